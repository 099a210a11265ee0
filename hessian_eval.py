"""Analyse the curvature of finished runs: why does a method work?
FedAlign (Mendieta et al., CVPR 2022), Sec. 3.4, Table 1, Fig. 1.

    lambda_max  top eigenvalue of the Hessian of the mean cross-entropy at the global model, by
                Lanczos; --top K: the K largest
    H_T         its trace: Hutchinson's estimator E[v' H v], v of independent random signs
    H_N, H_D    means over pairs of clients of (||d_k|| - ||d_j||)^2 and cos(d_k, d_j),
                d_k = Diag(H_k)    (Eqs. 3, 4)
    --density   eigenvalue density by stochastic Lanczos quadrature
    --landscape loss over the two top eigenvectors, on N x N points

Products with H (analysis/hessian.py) are sums over fixed batches without augmentation, the network
in eval mode: batch norm uses its running statistics, stochastic depth its expectation.
    --diagonal elementwise  d_k as in the paper: E[v * H_k v], one number a parameter, H_k of client
                            k's own data at its own model; pairs k < j. Few probes leave noise in
                            d_k, which raises norms and lowers cosines: see "noise".
    --diagonal tensor       as in the authors' code: its sums over each parameter tensor, on the
                            training data of all clients; all ordered pairs, k = j included. Table
                            1's magnitudes are of this reading.
    --authors               the rest of their code's choices: best.pt instead of the final model,
                            ten augmented batches drawn anew for each product, --diagonal tensor,
                            and an end of trace and diagonal once the trace's running mean
                            moves by less than 0.1%.
Their test for that lacks an absolute value, so that a negative mean stops it at once; ours has it.
Their power iteration sees other batches at each product; our eigenvalues, density and loss surface
are of one draw of the ten, since they are of one matrix.

Results go to RUN/hessian.json, arrays to RUN/hessian.npz, pictures to RUN/hessian-*.pdf. Runs need
--save-clients for H_N, H_D. The same command goes on after runs that have their results.

    python hessian_eval.py runs/a runs/b --samples 2000 --probes 50
"""

import functools
import time

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from analysis import hessian, pictures, runs

AT_ONCE = 2**25  # numbers of the probes in memory at once: 128 MB in fp32
AUTHORS_BATCHES = 10
TOLERANCE = 1e-3  # of eigenvalues, and of the authors' trace


class Batches:
    """Batches (x, y) of training samples of a run, on its device: the same at each iteration.

    index: the samples' places in the training set, of which --samples are taken. With --authors ten
    augmented batches, drawn anew at each iteration unless frozen. bar: a tqdm bar of batches."""

    def __init__(self, run, index, args, bar, frozen=False):
        if args.samples and len(index) > args.samples:
            rng = common.seeded_rng("samples", args.seed)
            index = rng.choice(index, args.samples, replace=False)
        self.run, self.index, self.bar = run, np.sort(index), bar
        self.args, self.frozen, self.iterations = args, frozen, 0
        most = AUTHORS_BATCHES * args.batch_size if args.authors else len(index)
        self.samples = min(len(index), most)

    def __iter__(self):
        data, args, index, augment = self.run.data, self.args, self.index, []
        rng = common.seeded_rng("authors", args.seed, self.iterations)
        if args.authors:
            self.iterations += not self.frozen
            index = rng.permutation(index)[: self.samples]
            augment = common.resolve_augment(self.run.args, data)
        parts = np.split(index, range(args.batch_size, len(index), args.batch_size))
        draws = [common.draw_augment(augment, rng, (len(part),)) for part in parts]
        seeds = [draw.pop("seed") for draw in draws] if "auto" in augment else None
        for part, draw, x in zip(parts, draws, data.images(parts, seeds)):
            device = data.y.device
            draw = {k: torch.from_numpy(v).to(device) for k, v in draw.items()}
            x = common.channels_last(data.normalise(common.apply_augment(x.to(device), draw)))
            yield x, data.y[part]
            self.bar.update()


def differences(d):
    """Return H_N and H_D of all pairs of diagonals d, (clients, n), each (clients, clients)."""
    norms = d.norm(dim=1)
    return (norms[:, None] - norms).square(), d @ d.T / torch.outer(norms, norms).clamp(min=1e-30)


def estimate(net, batches, args, reduce):
    """Return hutchinson()'s mean, error and number of probes of a network's v * H v."""
    w = hessian.flatten(hessian.trainable(net))
    at_once = 1 if args.authors else max(1, AT_ONCE // len(w))
    probes = hessian.random_signs(w, args.probes, args.seed, at_once)
    product = functools.partial(hessian.hvp, net, batches)
    return hessian.hutchinson(product, probes, reduce, tol=TOLERANCE * args.authors)


def measure_diagonals(run, train, args, bar):
    """Return the results of the clients' diagonals, H_N and H_D among them, and the diagonals.

    train: Batches of all clients' samples, for --diagonal tensor."""
    per_tensor = args.diagonal == "tensor"
    sizes = [p.numel() for p in hessian.trainable(run.net)]

    def reduce(d):
        return torch.stack([part.sum(1) for part in d.split(sizes, 1)], 1) if per_tensor else d

    means, noise = [], []
    for k in run.clients:
        bar.set_description(f"{run.path}: diagonal of client {k}")
        batches = train if per_tensor else Batches(run, run.parts[k], args, bar)
        mean, error, _ = estimate(run.client_net(k), batches, args, reduce)
        means.append(mean.cpu())
        noise.append(float(error.norm() / mean.norm()))
    d = torch.stack(means)
    first = -len(d) if per_tensor else 1  # diagonal: the authors' code has all pairs, also k = j
    pairs = torch.ones(len(d), len(d), dtype=torch.bool).triu(first)
    h_n, h_d = (float(m[pairs].mean()) if pairs.any() else None for m in differences(d))
    clients = {"ids": run.clients, "norms": d.norm(dim=1).tolist(), "noise": noise}
    return {"clients": clients, "H_N": h_n, "H_D": h_d}, d.numpy()


@torch.no_grad()
def loss_surface(net, batches, d1, d2, coefficients):
    """Return the mean loss at w + a_i d1 + a_j d2, (points, points), of coefficients a, (points,).

    w: the parameters of net, (n,), as d1 and d2."""
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    w, sizes = hessian.flatten(parameters.values()), [p.numel() for p in parameters.values()]

    def mean_loss(a, b):
        parts = (w + float(a) * d1 + float(b) * d2).split(sizes)
        moved = {k: part.view_as(p) for (k, p), part in zip(parameters.items(), parts)}
        total, samples = 0.0, 0
        for x, y in batches:
            loss = F.cross_entropy(torch.func.functional_call(net, moved, x), y)
            total, samples = total + loss.double() * len(y), samples + len(y)
        return float(total / samples)

    return np.array([[mean_loss(a, b) for b in coefficients] for a in coefficients])


def measure_pictures(run, net, batches, directions, args, bar):
    """Return the arrays and pictures of --density and --landscape; directions: (k, n)."""
    arrays, drawn = {}, {}
    if args.density:
        bar.set_description(f"{run.path}: density")
        signs = hessian.random_signs(directions[0], args.density, args.seed)
        product = functools.partial(hessian.hvp, net, batches)
        nodes, weights = hessian.density(product, signs, args.max_iterations)
        arrays |= {"density_nodes": nodes, "density_weights": weights}
        drawn["density"] = pictures.density, nodes, weights, run.title
    if args.landscape:
        bar.set_description(f"{run.path}: landscape")
        at = np.linspace(-args.radius, args.radius, args.landscape)
        losses = loss_surface(net, batches, *directions[:2], at)
        arrays |= {"landscape_coefficients": at, "landscape_loss": losses}
        drawn["landscape"] = pictures.loss_surface, at, losses, run.title
    return arrays, drawn


def analyse(run, args):
    """Return the result, arrays and pictures of a run, as runs.keep() takes them."""
    start, bar = time.perf_counter(), tqdm(unit="batch", disable=None)
    net, everyone = run.load_net(run.best) if args.authors else run.net, np.concatenate(run.parts)
    train, fixed = (Batches(run, everyone, args, bar, frozen) for frozen in (False, True))
    for k in run.clients if args.diagonal != "none" else ():
        run.client_net(k)  # which refuses a missing one now, not after hours
    bar.set_description(f"{run.path}: eigenvalues")
    product, w = functools.partial(hessian.hvp, net, fixed), hessian.trainable(net)
    (probe,) = next(hessian.random_signs(hessian.flatten(w), 1, args.seed))
    limits = max(args.top, 2 if args.landscape else 1), TOLERANCE, args.max_iterations
    values, vectors, residuals, steps = hessian.top_eigenpairs(product, probe, *limits)
    pairs = zip(values.tolist(), residuals.tolist())
    bar.set_description(f"{run.path}: trace")
    mean, error, probes = estimate(net, train, args, lambda d: d.sum(1))
    result = {
        "accuracy": run.rows[-1]["best_acc" if args.authors else "test_acc"],
        "weights": "best.pt" if args.authors else "model.pt",
        "samples": train.samples,
        "eigenvalues": [{"value": v, "residual": r, "iterations": steps} for v, r in pairs],
        "trace": {"value": float(mean), "standard_error": float(error), "probes": probes},
    }
    arrays = {"eigenvectors": vectors.cpu().numpy()}
    if args.diagonal != "none":
        found, arrays["diagonals"] = measure_diagonals(run, train, args, bar)
        result |= found
    more, drawn = measure_pictures(run, net, fixed, vectors, args, bar)
    bar.close()
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result | {"settings": args.settings}, arrays | more, drawn


def warn(path, result, top):
    """Print lines about figures that are not to be trusted; top: eigenvalues asked for."""
    pairs = ((pair["residual"], abs(pair["value"])) for pair in result["eigenvalues"])
    good = sum(residual <= TOLERANCE * size for residual, size in pairs)
    if good < top:
        tqdm.write(f"{path}: {top - good} eigenvalues not found; raise --max-iterations")
    noise = max(result.get("clients", {}).get("noise", [0]))
    if noise > 0.5:
        why = f"up to {noise:.0%} of a client's diagonal, of H_N and of H_D is noise of the probes"
        tqdm.write(f"{path}: {why}; raise --probes")


def table_line(path, result):
    """Return a run's line of the table."""
    top, trace = result["eigenvalues"][0], result["trace"]
    means = {name: result.get(name) for name in ("H_N", "H_D")}
    return {
        "run": path,
        "script": result["script"],
        "accuracy (%)": f"{result['accuracy']:.2f}",
        "lambda_max": f"{top['value']:.4g}",
        "residual": f"{top['residual']:.2g}",
        "H_T": f"{trace['value']:.4g} +- {trace['standard_error']:.2g}",
        **{name: "-" if mean is None else f"{mean:.4g}" for name, mean in means.items()},
    }


def parse_flags(argv):
    """Return the flags of argv, with the reading of the diagonal settled."""
    parser = common.PlainParser(__doc__)
    add, pair = parser.add_argument, common.number(int, 2)
    add("runs", nargs="+", metavar="RUN", help="folders of finished runs, made with --save-clients")
    add("--top", type=common.COUNT, default=1, metavar="K", help="eigenvalues")
    add("--max-iterations", type=pair, default=100, help="steps of Lanczos, of the density too")
    add("--probes", type=pair, default=100, help="random vectors of trace and diagonals")
    add("--diagonal", choices=["elementwise", "tensor", "none"], help="none: no H_N, H_D")
    add("--density", type=common.SEED, default=0, metavar="PROBES", help="of the eigenvalues")
    add("--landscape", type=pair, metavar="N", help="N x N points (the paper: 41)")
    add("--radius", type=common.POSITIVE, default=1.0, help="of the landscape, along unit vectors")
    add("--samples", type=pair, metavar="M", help="M random training samples (and of each client)")
    add("--batch-size", type=common.COUNT, default=64, help="at once; matters with --authors alone")
    add("--authors", action="store_true", help="as the FedAlign code, see above")
    add("--seed", type=common.SEED, default=0, help="of what the analysis draws")
    runs.add_run_flags(parser, "hessian")
    args = parser.parse_args(argv)
    args.diagonal = args.diagonal or ("tensor" if args.authors else "elementwise")
    args.settings = {k: v for k, v in vars(args).items() if k not in ("runs", "device", "data_dir")}
    return args


def main(argv=None):
    """Analyse the runs that lack results, and print a table of all."""
    args, results = parse_flags(argv), {}
    with common.one_line_errors("hessian_eval"):
        for path in args.runs:
            results[path] = runs.read_result(path, args.name)
            if (results[path] or {}).get("settings") == args.settings:
                tqdm.write(f"{path}: already analysed with these settings, in {args.name}.json")
            else:
                results[path] = runs.analyse(path, args, analyse)
        for path, result in results.items():
            warn(path, result, max(args.top, len(result["eigenvalues"])))
        print(runs.table([table_line(path, result) for path, result in results.items()]))


if __name__ == "__main__":
    main()
