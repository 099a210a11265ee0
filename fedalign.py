"""FedAlign: Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning
Mendieta, Yang, Wang, Lee, Ding, Chen. CVPR 2022. https://arxiv.org/abs/2111.14213

FedAvg with a local loss that aligns the Lipschitz constants of the network's last block L at full
and at reduced width:
    L_FA = CE + mu L_Lip(K_S, K_F),   L_Lip = mean squared error over the batch              (Eq. 5)
    K = spectral norm of a sample's transmitting matrix X, by power iteration on X X^T
    X_F = f_(L-1)^T f_L,   X_S = f_(L-1)^T f_L^S                                        (Eqs. 6, 7)
f_(L-1) and f_L are the feature maps into and out of block L; f_L^S comes out of the same block at
width omega_S, run on the leading channels of f_(L-1). K_F and f_(L-1) are constants, so L_Lip
trains the weights of the sub-block alone.

State: none. Bytes per client and round: the model down, the model up.
Block L is the last block with a convolution: stage 3 of ResNet56, stage 4 of ResNet18, the last
convolution of a plain CNN. As the authors' code, and unlike the paper's text:
    X is divided by H W, the positions of f_L, to which f_(L-1) is average-pooled
    L_Lip is scaled by CE / L_Lip, a constant, so that the second term's value is mu CE; with
        --lip-scale none it is not (Eq. 5)
    X_S is made of the leading channels of f_(L-1); with --lip-input full of all (Eq. 7)
    the gradient norm is clipped at 10 (--clip)
Their code runs two backward passes; ours runs one on the sum.

FedAlign paper, Table 5, row FedAlign: 56.9 +- 0.5. Not measured here yet.
    python fedalign.py --dataset cifar100 --model resnet56 --clients 16 --alpha 0.5 --rounds 25 \\
        --epochs 20 --drop-last --mu 0.45
"""

import common

import torch.nn as nn
import torch.nn.functional as F


def transmitting_matrix(h_in, h_out):
    """Return X = 1/(HW) sum_p a_p b_p^T of each sample, (batch, c_in, c_out).

    a: h_in, (batch, c_in, ., .), average-pooled to the H x W positions p of b: h_out, (batch,
    c_out, H, W)."""
    if h_in.ndim != 4 or h_out.ndim != 4:
        raise common.UserError("no feature maps into and out of the last block with a convolution")
    a = F.adaptive_avg_pool2d(h_in, h_out.shape[2:]).flatten(2)  # (batch, c_in, HW)
    b = h_out.flatten(2)  # (batch, c_out, HW)
    return a @ b.transpose(1, 2) / b.shape[2]


def spectral_norm(t, iterations=10):
    """Return the largest singular value, (batch,), of each matrix of t, (batch, rows, columns).

    By power iteration on T T^T from ones."""
    scale = t.detach().abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
    t = t / scale  # so that no square over- or underflows
    v = t.new_ones(*t.shape[:2], 1)  # (batch, rows, 1)
    for _ in range(iterations):
        v = t @ (t.transpose(1, 2) @ v)
        norm = v.square().sum(1, keepdim=True).clamp(min=1e-30).sqrt()  # dead features: zeros
        v = v / norm
    return (scale * norm.sqrt()).flatten()  # the last norm is lambda_max(T T^T)


def last_block(net):
    """Return the number of the last block with a convolution, 0 if there is none."""
    with_convolution = [any(isinstance(m, nn.Conv2d) for m in block.modules()) for block in net]
    return max((i for i, convolution in enumerate(with_convolution) if convolution), default=0)


def lipschitz_loss(block, h, f, width=0.25, lip_input="slim"):
    """Return L_Lip of block, whose input and output are h and f (Eqs. 5 to 7).

    h: (batch, c_in, ., .), f: (batch, c_out, H, W); no gradient should reach either. width:
    omega_S; lip_input: "slim" or "full", the channels of h in X_S."""
    h_s = h[:, : common.make_divisible(h.shape[1], width)]
    f_s = common.at_width(block, h_s, width)
    k_f = spectral_norm(transmitting_matrix(h, f))  # Eq. 6
    k_s = spectral_norm(transmitting_matrix(h if lip_input == "full" else h_s, f_s))  # Eq. 7
    return F.mse_loss(k_s, k_f)


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    last = last_block(net)
    below, block, above = net[:last], net[last], net[last + 1 :]

    def step(x, y):
        h = below(x)
        f = block(h)
        out = above(f)
        loss = F.cross_entropy(out, y)
        if args.mu:
            lip = lipschitz_loss(block, h.detach(), f.detach(), args.width, args.lip_input)
            scale = (loss / lip.clamp(min=1e-12)).detach() if args.lip_scale == "ce" else 1
            loss = loss + args.mu * scale * lip  # Eq. 5
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    parser.set_defaults(clip=10.0)
    add, weight = parser.add_argument, common.number(float, 0)
    width = common.number(float, 0, 1, open_low=True)
    add("--mu", type=weight, default=0.45, help="of L_Lip; 0 (and --clip 0) is FedAvg")
    add("--width", type=width, default=0.25, help="omega_S; at 1 L_Lip vanishes")
    add("--lip-scale", default="ce", choices=["ce", "none"], help="factor on L_Lip, see above")
    add("--lip-input", default="slim", choices=["slim", "full"], help="channels of X_S, see above")
    args = parser.parse_args(argv)
    return run(args, local_update)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
