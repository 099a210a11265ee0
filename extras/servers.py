"""Server optimizers: what --server and --server-lr do with the average of the clients' models."""

import torch


def step(w, mean, server, args):
    """Return the parameters after one step of --server from w along Delta = mean - w.

    w, mean: {name: tensor}; batch-norm statistics have no step. server keeps m and v.
        avg:   w + lr Delta
        avgm:  m <- beta m + Delta, w + lr m                         (FedAvgM, Hsu et al. 2019)
        adam:  m <- beta1 m + (1 - beta1) Delta, v <- beta2 v + (1 - beta2) Delta^2,
               w + lr m / (sqrt(v) + tau)            (FedADAM, Reddi et al., ICLR 2021, Algorithm 2)
        yogi:  the same with v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)       (FedYogi, ibid.)
    with v starting at tau^2 and without bias correction."""
    delta = {k: mean[k] - w[k] for k in w}
    if args.server == "avgm":
        m = server.setdefault("m", {k: torch.zeros_like(v) for k, v in w.items()})
        for k in w:
            m[k].mul_(args.server_momentum).add_(delta[k])
        delta = m
    elif args.server in ("adam", "yogi"):
        delta = adam_step(delta, server, args)
    return {k: w[k] + args.server_lr * delta[k] for k in w}


def adam_step(delta, server, args):
    """Return m / (sqrt(v) + tau) of {name: Delta}, and renew m and v in server."""
    tau, beta1, beta2 = args.server_tau, args.server_momentum, args.server_beta2
    m = server.setdefault("m", {k: torch.zeros_like(d) for k, d in delta.items()})
    v = server.setdefault("v", {k: torch.full_like(d, tau**2) for k, d in delta.items()})
    for k, d in delta.items():
        m[k].mul_(beta1).add_(d, alpha=1 - beta1)
        if args.server == "yogi":
            v[k].addcmul_(d * d, (v[k] - d * d).sign(), value=beta2 - 1)
        else:
            v[k].mul_(beta2).addcmul_(d, d, value=1 - beta2)
    return {k: m[k] / (v[k].sqrt() + tau) for k in delta}
