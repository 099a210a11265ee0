"""rFedAvg: Distribution-Regularized Federated Learning on Non-IID Data
Wang, Tong, Zhou, Zhang, Pan, Fan, Yang. ICDE 2023.

FedAvg with a term that draws the mean feature of a client's batch, phi, towards the mean features delta_j of others:
    L = F_k + lambda r_k
    rfedavg:   r_k = 1/(N-1) sum_(j != k) ||phi - delta_j||^2                      (Eq. 5, Algorithm 1)
    rfedavg+:  r_k = ||phi - 1/(N-1) sum_(j != k) delta_j||^2                      (Algorithm 2)
features: what the classifier reads; delta_j: constants, means over all data of client j by its own network at the end of
its last round (rfedavg), or by the new global network, in a second synchronisation of each round (rfedavg+). The sums are
over clients that have a delta. For the same deltas both have the same gradient; without another client's delta r_k is 0.
--noise sigma: delta_k is clipped to norm C and gets 1/B N(0, sigma^2 C^2 I), B the batch size (Fig. 12).

State: the server keeps the delta of every client. Bytes per client and round: the model down and up, and of deltas N d down,
d up (rfedavg), d down, d up (rfedavg+, which with sampling downloads the new model once more); bytes_delta counts these.
--reading code, after the authors' code: delta of one random batch; only deltas of the clients sampled in this round, each
as of the last round that client took part in; in rfedavg+ the own one counts too; noise N(0, sigma^2 / B I), not clipped, on
each delta in rfedavg, on their mean in rfedavg+.
Theirs sends the raw features of the batch, and measures anew at the start of a round instead of at the end of the last.

rFedAvg paper, Table I, CIFAR-10, row rFedAvg+, cross-silo, similarity 0%:
    python rfedavg.py --dataset cifar10 --image-size 28 --normalise half --model cnn-mcmahan --partition similarity \\
        --similarity 0 --clients 20 --rounds 200 --epochs 5 --batch-size 100 --lr 0.1 --momentum 0 --weight-decay 0 \\
        --augment none --drop-last --weighting uniform --variant rfedavg+ --lam 1e-5
"""

import dataclasses

import torch
import torch.nn.functional as F

import common


def noise(delta, size, *key):
    """N(0, size^2) in the shape of delta, (d,)."""
    return torch.as_tensor(common.keyed("noise", *key).standard_normal(len(delta))).to(delta) * size


@torch.no_grad()
def mean_feature(net, batches):
    """Mean of the features over all samples of the batches, (d,), in eval mode."""
    training = net.training
    net.eval()
    total = samples = 0
    for x, _ in batches:
        total, samples = total + net[:-1](x).float().sum(0), samples + len(x)
    net.train(training)
    return total / samples


def delta_of(worker, client, server, args):
    """delta_k of worker.net: over all data or one batch, clipped and with noise if asked for."""
    batches = worker.batches(client)
    code = args.reading == "code"
    if code:
        order = common.keyed("delta", args.seed, server["round"], client.id).permutation(
            client.index
        )
        batches = worker.batches(dataclasses.replace(client, index=order[: args.batch_size]))
    delta = mean_feature(worker.net, batches)
    key = args.seed, server["round"], client.id
    if args.noise and not code:
        delta = delta * (args.noise_clip / delta.norm().clamp(min=1e-12)).clamp(max=1)
        delta = delta + noise(delta, args.noise * args.noise_clip / args.batch_size, *key)
    elif args.noise and args.variant == "rfedavg":
        delta = delta + noise(delta, args.noise / args.batch_size**0.5, *key)
    return delta


def targets(server, client, args):
    """The deltas, (., d), that client k is drawn towards; None if there are none."""
    deltas = server.get("deltas", {})
    shared = args.reading == "code" and args.variant == "rfedavg+"  # all clients get the same mean
    ids = [
        j
        for j in deltas
        if (shared or j != client.id) and (args.reading == "paper" or j in server["clients"])
    ]
    others = torch.stack([deltas[j] for j in ids]) if ids else None
    if shared and ids and args.noise:
        others = others.mean(0, keepdim=True)
        others = others + noise(
            others[0], args.noise / args.batch_size**0.5, args.seed, server["round"]
        )
    return others


def synchronise(worker, clients, server, args):
    """rfedavg+: the new global network goes to the clients, their deltas come back."""
    for client in clients:
        if args.sample < 1:  # else it doubles as the next round's broadcast
            client.download(worker.net.state_dict())
        delta = server["deltas"][client.id] = client.upload(delta_of(worker, client, server, args))
        server["report"]["bytes_delta"] += common.nbytes(delta)


def aggregate(net, uploads, server, args):
    """FedAvg's average; the deltas of rfedavg are kept for the next round."""
    deltas, report = {}, {"bytes_delta": 0}

    def noted():
        for upload in uploads:
            report["bytes_delta"] += upload.client.bytes_down + common.nbytes(upload.message)
            deltas.update({upload.client.id: delta for delta in upload.message.values()})
            yield upload

    common.average(net, noted(), server, args)
    server["deltas"] = {**server.get("deltas", {}), **deltas}
    server["report"] = report


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    others = targets(server, client, args)
    known = worker.pin("known", float(others is not None))  # 0 skips the term
    d = net[-1].in_features
    mean = worker.pin("mean", torch.zeros(d) if others is None else others.mean(0))
    # mean_j ||phi - delta_j||^2 = ||phi - mean||^2 + the spread of the deltas
    plus = args.variant == "rfedavg+" or others is None
    spread = worker.pin("spread", 0.0 if plus else (others - others.mean(0)).square().sum(1).mean())
    if others is not None:
        everyone = others if args.reading == "code" else torch.empty(args.clients, d, device="meta")
        client.download(others[0] if args.variant == "rfedavg+" else everyone)

    def step(x, y):
        z = net[:-1](x)
        out = net[-1](z)
        loss = F.cross_entropy(out, y)
        if args.lam:
            loss = loss + args.lam * known * ((z.float().mean(0) - mean).square().sum() + spread)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step
    if args.variant == "rfedavg":
        return {"delta": delta_of(worker, client, server, args)}


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    parser.add_argument("--variant", default="rfedavg+", choices=["rfedavg", "rfedavg+"])
    parser.add_argument(
        "--lam", type=common.number(float, 0), default=1e-4, help="lambda; 0 is FedAvg"
    )
    parser.add_argument(
        "--reading",
        default="paper",
        choices=["paper", "code"],
        help="the paper's deltas, or the authors' code's",
    )
    parser.add_argument(
        "--noise",
        type=common.number(float, 0),
        default=0.0,
        help="sigma of the Gaussian noise; 0 is none",
    )
    parser.add_argument(
        "--noise-clip",
        type=common.number(float, 0, open_low=True),
        help="C, the norm delta is clipped to; needed with --noise",
    )
    args = parser.parse_args(argv)
    if args.noise and not args.noise_clip and args.reading == "paper":
        parser.error("argument --noise-clip: needed by --noise")
    if args.noise_clip and not (args.noise and args.reading == "paper"):
        parser.error("argument --noise-clip: only read with --noise and --reading paper")
    return run(
        args,
        local_update,
        aggregate,
        after_round=synchronise if args.variant == "rfedavg+" else None,
    )


if __name__ == "__main__":
    main()
