"""Second-order analysis of finished runs: why does a method work?
FedAlign (Mendieta et al., CVPR 2022), Sec. 3.4, Table 1, Fig. 1

    lambda_max  top eigenvalue of the Hessian of the mean cross-entropy at the global model: power iteration, and Lanczos
                where that ends elsewhere, or with --top K
    H_T         its trace: Hutchinson's estimator E[v' H v], v of independent random signs
    H_N, H_D    means over pairs of clients of (||d_k|| - ||d_j||)^2 and cos(d_k, d_j), d_k = Diag(H_k)    (Eqs. 3, 4)
    --density   eigenvalue density by stochastic Lanczos quadrature; --landscape N: loss over the two top eigenvectors

Hessian-vector products H v are gradients of <grad L, v>, summed over fixed batches without augmentation. The network is in
eval mode: batch norm uses its running statistics, stochastic depth its expectation. Two readings of d_k:
    --diagonal elementwise  the paper's: E[v * H_k v], one number a parameter, H_k of client k's own data at its own model;
                            pairs k < j. Few probes leave noise in d_k, which raises norms and lowers cosines: see "noise".
    --diagonal tensor       the authors' code's: its sums over each parameter tensor, on the training data of all clients,
                            averaged over all ordered pairs, k = j included. Table 1's magnitudes are of this reading.
--authors takes the rest of their code's choices: best.pt instead of the final model, ten augmented batches drawn anew for
each product, --diagonal tensor, and the trace stops when its running mean moves by less than 0.1%. Their test for that lacks
an absolute value, so that a negative mean stops it at once; ours has it. Eigenvalues, density and loss surface are of one
draw of the ten batches, since they are of one matrix; in their code the power iteration sees another one at each product.

Results go to RUN/hessian.json, arrays to RUN/hessian.npz, pictures to RUN/hessian-*.pdf. Runs need --save-clients for H_N, H_D.
The same command goes on after runs that have their results, and shows these in its table.

    python hessian_eval.py runs/a runs/b --samples 2000 --probes 50
"""

import argparse
import contextlib
import json
import math
import pathlib
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import analysis
import common


# --- the Hessian of a network's loss; net stays in the mode it is in


@contextlib.contextmanager
def _twice_differentiable(net):
    """The fused LSTM kernels cannot be differentiated twice."""
    if not any(isinstance(m, nn.RNNBase) for m in net.modules()):
        yield
        return
    before, torch.backends.cudnn.enabled = (
        torch.backends.cudnn.enabled,
        False,
    )  # its flags() cannot read our fp32_precision
    try:
        with torch.backends.mkldnn.flags(enabled=False):
            yield
    finally:
        torch.backends.cudnn.enabled = before


def parameters(net):
    return [p for p in net.parameters() if p.requires_grad]


def unflat(net, v):
    """v, (n,), as a list of tensors shaped as the n parameters."""
    return [
        part.view(p.shape)
        for part, p in zip(v.split([p.numel() for p in parameters(net)]), parameters(net))
    ]


def hessian_vector_product(net, batches, v, loss=F.cross_entropy):
    """H v, of v's shape: (n,), or (k, n) for k products that share each batch's first backward pass. H: the Hessian of the
    mean of loss(net(x), y), itself a mean over a batch, over all samples of batches, an iterable of (x, y)."""
    weights, rows = parameters(net), v.reshape(-1, v.shape[-1])
    total, samples = torch.zeros_like(rows), 0
    for x, y in batches:
        with torch.enable_grad(), _twice_differentiable(net):
            grads = torch.autograd.grad(
                loss(net(x), y), weights, create_graph=True, materialize_grads=True
            )
            curved = [g.requires_grad for g in grads]  # a gradient that is constant has no graph
            for i, row in enumerate(rows):
                along = [d for d, c in zip(unflat(net, row), curved) if c]
                outputs = [g for g, c in zip(grads, curved) if c]
                if outputs:
                    hv = torch.autograd.grad(
                        outputs,
                        weights,
                        along,
                        retain_graph=i + 1 < len(rows),
                        materialize_grads=True,
                    )
                    total[i].add_(torch.cat([h.flatten() for h in hv]), alpha=len(y))
        samples += len(y)
    return (total / samples).view_as(v)


def _probes(net, count, seed, at_once):
    """count vectors of random signs in chunks of (at most at_once, n); the i-th depends on seed and i alone."""
    like = parameters(net)[0]
    n = sum(p.numel() for p in parameters(net))
    for start in range(0, count, at_once):
        own = (common.keyed("probe", seed, i) for i in range(start, min(count, start + at_once)))
        yield (
            torch.from_numpy(np.stack([rng.integers(2, size=n, dtype=np.int8) for rng in own])).to(
                like
            )
            * 2
            - 1
        )


def _hutchinson(net, batches, probes, seed, loss, reduce, tol=0.0):
    """Mean and standard error of reduce(v * H v), (k, n) -> (k, ...), over random signs v, and the number of probes used.
    tol: stop when the running mean of a scalar moves by less than this share; 0 goes on to the end."""
    n = sum(p.numel() for p in parameters(net))
    at_once = 1 if tol else max(1, 2**25 // n)  # 128 MB of probes in fp32
    mean = squares = 0.0
    used = 0
    for v in _probes(net, probes, seed, at_once):
        for value in reduce(v * hessian_vector_product(net, batches, v, loss)).double():
            used += 1
            previous, shift = mean, value - mean
            mean = mean + shift / used
            squares = squares + shift * (value - mean)
        if tol and used > 1 and abs(float(mean - previous)) < tol * (abs(float(previous)) + 1e-6):
            break
    error = (squares / (used - 1) / used).sqrt() if used > 1 else torch.full_like(mean, math.nan)
    return mean, error, used


def trace(net, batches, probes, seed=0, tol=0.0, loss=F.cross_entropy):
    """Hutchinson's estimate of tr H, its standard error, and the number of probes used."""
    mean, error, used = _hutchinson(
        net, batches, probes, seed, loss, lambda d: d.sum(1, dtype=torch.float64), tol
    )
    return float(mean), float(error), used


def diagonal(net, batches, probes, seed=0, per_tensor=False, loss=F.cross_entropy):
    """Estimate of Diag(H), (n,), and its standard error, (n,); per_tensor: of its sums over each parameter tensor."""

    def sums(d):
        return torch.stack(
            [
                part.sum(1, dtype=torch.float64)
                for part in d.split([p.numel() for p in parameters(net)], 1)
            ],
            1,
        )

    return _hutchinson(net, batches, probes, seed, loss, sums if per_tensor else lambda d: d)[:2]


def hessian_norm_difference(d1, d2):
    """H_N of two clients' diagonals (FedAlign, Eq. 3)."""
    return (d1.norm() - d2.norm()).square()


def hessian_direction(d1, d2):
    """H_D of two clients' diagonals (FedAlign, Eq. 4)."""
    return (
        d1 @ d2 / (d1.norm() * d2.norm()).clamp(min=1e-300 if d1.dtype == torch.float64 else 1e-30)
    )


def _start(net, seed):
    n = sum(p.numel() for p in parameters(net))
    v = torch.from_numpy(common.keyed("start", seed).standard_normal(n)).to(parameters(net)[0])
    return v / v.norm()


def power_iteration(product, v, tol, max_iterations):
    """(value, vector, report) of the eigenvalue of largest magnitude of the symmetric map product, from the unit vector v.
    Stops when the Rayleigh quotient moves by less than tol, relatively; converged if the residual ||H v - value v||, which
    bounds the distance to an eigenvalue, is then within sqrt(tol) of the value."""
    value = None
    for iteration in range(1, max_iterations + 1):
        hv = product(v)
        previous, value = value, float(v @ hv)
        residual, norm = float((hv - value * v).norm()), float(hv.norm())
        still = norm == 0 or previous is not None and abs(value - previous) <= tol * abs(value)
        if still or iteration == max_iterations:
            converged = still and residual <= math.sqrt(tol) * abs(value)
            return value, v, {"iterations": iteration, "residual": residual, "converged": converged}
        v = hv / norm


def lanczos(product, v, steps, enough=lambda values, residuals: False):
    """Lanczos with full reorthogonalisation from the unit vector v: Ritz values ascending, their residual bounds, vectors
    (m, m) as columns in the basis, and the basis (m, n), after m = steps steps or when enough(values, residuals). Where the
    start is exhausted it goes on from a vector orthogonal to all before, up to n steps."""
    basis, alphas, betas, rng = v[None], [], [], common.keyed("lanczos")
    steps = min(steps, len(v))
    while True:
        w = product(basis[-1])
        alphas.append(float(basis[-1] @ w))
        for _ in range(2):
            w = w - basis.T @ (basis @ w)
        beta, m = float(w.norm()), len(alphas)
        t = np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1)
        values, vectors = np.linalg.eigh(t)
        if beta <= 100 * torch.finfo(v.dtype).eps * max(map(abs, values)):
            beta = 0.0
        residuals = beta * np.abs(vectors[-1])
        if m == steps or enough(values, residuals):
            return values, residuals, vectors, basis
        if beta == 0:
            w = torch.from_numpy(rng.standard_normal(len(v))).to(v)
            for _ in range(2):
                w = w - basis.T @ (basis @ w)
        betas.append(beta)
        basis = torch.cat([basis, (w / w.norm())[None]])


def top_eigenvalues(net, batches, k=1, tol=1e-3, max_iterations=100, seed=0, loss=F.cross_entropy):
    """The k largest eigenvalues of the Hessian, descending, (k,) float64; their unit vectors (k, n); for each a report
    {iterations, residual, converged}. k = 1: power iteration; if that ends at a negative value, or with a residual above
    sqrt(tol) times the value, and for k > 1: Lanczos until residuals are below tol times the value, which keeps up to
    max_iterations vectors and may find fewer than k."""

    def product(v):
        return hessian_vector_product(net, batches, v, loss)

    v, before = _start(net, seed), 0
    if k == 1:
        value, vector, report = power_iteration(product, v, tol, max_iterations)
        if report["residual"] <= math.sqrt(tol) * value:
            return torch.tensor([value], dtype=torch.float64), vector[None], [report]
        before = report["iterations"]

    def enough(values, residuals):
        return len(values) >= k and bool((residuals[-k:] <= tol * np.abs(values[-k:])).all())

    values, residuals, vectors, basis = lanczos(product, v, max_iterations, enough)
    top = np.arange(len(values))[::-1][:k]
    reports = [
        {
            "iterations": before + len(values),
            "residual": float(residuals[i]),
            "converged": bool(residuals[i] <= tol * abs(values[i])),
        }
        for i in top
    ]
    found = torch.from_numpy(np.ascontiguousarray(vectors[:, top].T)).to(v) @ basis
    return torch.from_numpy(values[top].copy()), found, reports


def density(net, batches, probes, steps, seed=0, loss=F.cross_entropy):
    """Eigenvalue density by stochastic Lanczos quadrature: nodes and weights, (probes, steps) each, a row's weights summing to
    one. sum w theta^p of a row is v' H^p v / n for its probe v, for p < 2 steps; the mean over probes estimates tr H^p / n."""
    nodes, weights = [], []
    for v in _probes(net, probes, seed, 1):
        v = v[0] / v[0].norm()
        values, _, vectors, _ = lanczos(
            lambda u: hessian_vector_product(net, batches, u, loss), v, steps
        )
        nodes.append(values)
        weights.append(vectors[0] ** 2)
    return np.stack(nodes), np.stack(weights)


@torch.no_grad()
def mean_loss(net, batches, loss=F.cross_entropy):
    total, samples = 0.0, 0
    for x, y in batches:
        total, samples = total + loss(net(x), y).double() * len(y), samples + len(y)
    return float(total / samples)


def filter_normalised(net, seed):
    """A random direction, (n,), each filter (row of a weight) as long as the network's; zero for biases and normalisation
    layers (Li et al., NeurIPS 2018)."""
    rng, parts = common.keyed("filter", seed), []
    for p in parameters(net):
        d = torch.from_numpy(rng.standard_normal(tuple(p.shape))).to(p)
        if p.ndim < 2:
            d = torch.zeros_like(p)
        else:
            rows, own = d.flatten(1), p.detach().flatten(1)
            d = (
                rows
                / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
                * own.norm(dim=1, keepdim=True)
            )
        parts.append(d.flatten())
    return torch.cat(parts)


@torch.no_grad()
def loss_surface(net, batches, d1, d2, coefficients, loss=F.cross_entropy):
    """Mean loss, (len(coefficients),) * 2, at w + a_i d1 + a_j d2; w is put back afterwards."""
    weights = parameters(net)
    w = [p.clone() for p in weights]
    surface = np.empty((len(coefficients),) * 2)
    try:
        for i, a in enumerate(coefficients):
            for j, b in enumerate(coefficients):
                for p, start, shift in zip(weights, w, unflat(net, float(a) * d1 + float(b) * d2)):
                    p.copy_(start + shift)
                surface[i, j] = mean_loss(net, batches, loss)
    finally:
        for p, start in zip(weights, w):
            p.copy_(start)
    return surface


# --- runs


class Batches:
    """(x, y) of training samples of a run in a fixed order, each time that it is iterated over. augmented: instead so many
    augmented batches, drawn by seed, anew each time or, if frozen, once and for all."""

    def __init__(self, run, index, size, bar, augmented=0, seed=0, frozen=False):
        self.run, self.index, self.size, self.bar = run, np.sort(index), size, bar
        self.augmented, self.seed, self.frozen, self.times = augmented, seed, frozen, 0

    def __iter__(self):
        data, index, augment, device = self.run.data, self.index, {}, self.run.data.y.device
        if self.augmented:
            rng, augment = (
                common.keyed("authors", self.seed, self.times),
                common.resolve_augment(self.run.args),
            )
            self.times += not self.frozen
            index = rng.permutation(index)[: self.augmented * self.size]
        parts = np.split(index, range(self.size, len(index), self.size))
        draws = [
            common.draw_augment(augment, rng, (len(part),), data.image_size) if augment else {}
            for part in parts
        ]
        seeds = [own.pop("seed") for own in draws] if "seed" in augment else None
        for part, own, x in zip(parts, draws, data.images(parts, seeds)):
            x = common.apply_augment(
                x.to(device), {k: torch.from_numpy(v).to(device) for k, v in own.items()}
            )
            yield common.channels_last(data.normalise(x)), data.y[torch.from_numpy(part).to(device)]
            self.bar.update()


def draw_surface(plt, coefficients, surface, labels, title):
    """The loss as a surface and as contours, on one logarithmic colour scale. Losses that are not finite are drawn as the
    largest that is."""
    from matplotlib.colors import LogNorm

    finite = np.isfinite(surface)
    surface = np.maximum(
        np.where(finite, surface, surface[finite].max() if finite.any() else 1.0), 1e-6
    )
    norm = LogNorm(surface.min(), max(surface.max(), surface.min() * 1.01))
    figure = plt.figure(figsize=(10, 3.8))
    solid, flat = (
        figure.add_axes((0, 0, 0.42, 0.92), projection="3d"),
        figure.add_axes((0.56, 0.14, 0.32, 0.74)),
    )
    a, b = np.meshgrid(coefficients, coefficients, indexing="ij")
    solid.plot_surface(
        a,
        b,
        np.log10(surface),
        cmap="cividis",
        facecolors=plt.get_cmap("cividis")(norm(surface)),
        rstride=1,
        cstride=1,
        linewidth=0,
        antialiased=False,
    )
    solid.set(
        xlabel=f"step along {labels[0]}",
        ylabel=f"step along {labels[1]}",
        zlabel=r"$\log_{10}$ loss (nats)",
    )
    for axes in (solid, flat):
        axes.locator_params(axis="both", nbins=5)
    solid.view_init(28, -55)
    levels = np.geomspace(norm.vmin, norm.vmax, 13)
    filled = flat.contourf(a, b, surface, levels, cmap="cividis", norm=norm)
    flat.contour(a, b, surface, levels, colors="white", linewidths=0.4)
    flat.plot(0, 0, "+", color="red", markersize=9)
    flat.set(xlabel=f"step along {labels[0]}", ylabel=f"step along {labels[1]}", aspect="equal")
    bar = figure.colorbar(
        filled, ax=flat, label="mean cross-entropy (nats)", format="%.3g", ticks=levels[::2]
    )
    bar.minorticks_off()
    figure.suptitle(title, fontsize=11)
    return figure


def draw_density(plt, nodes, weights, title):
    """The density smoothed by a Gaussian of 1% of the range."""
    low, high = nodes.min(), nodes.max()
    sigma = max(0.01 * (high - low), 1e-12)
    grid = np.linspace(low - 5 * sigma, high + 5 * sigma, 1000)
    kernel = np.exp(-((grid[:, None, None] - nodes) ** 2) / (2 * sigma**2)) / (
        sigma * math.sqrt(2 * math.pi)
    )
    curve = (kernel * weights).sum(2).mean(1)
    figure, axes = plt.subplots(figsize=(4.2, 3))
    axes.semilogy(grid, np.maximum(curve, 1e-12), color="#0072b2")
    axes.set(
        xlabel="eigenvalue of the Hessian",
        ylabel="density",
        title=title,
        ylim=(curve.max() * 1e-9, curve.max() * 2),
    )
    axes.grid(alpha=0.3)
    return figure


def opened(path, args):
    """(run, its global network, {client: network}): all that is read from a run folder."""
    run = analysis.open_run(path, analysis.machine(args))
    nets = {k: run.client_net(k) for k in run.clients} if args.diagonal != "none" else {}
    return run, run.net_of(run.path / "best.pt") if args.authors else run.net, nets


def analyse(path, args, bar):
    """Everything that is asked for about one run: (result for JSON, arrays, pictures)."""
    run, net, client_nets = opened(path, args)
    clients, everyone = list(client_nets), np.concatenate(run.parts)

    def batches(index, frozen=False):
        if args.samples and len(index) > args.samples:
            index = common.keyed("samples", args.seed).choice(index, args.samples, replace=False)
        return Batches(run, index, args.batch_size, bar, 10 * args.authors, args.seed, frozen)

    def stage(text):
        bar.set_description(f"{run.path}: {text}")

    started, train, fixed = time.perf_counter(), batches(everyone), batches(everyone, frozen=True)
    result = {
        "script": run.script,
        "round": run.rows[-1]["round"],
        "accuracy": run.rows[-1]["best_acc" if args.authors else "test_acc"],
        "weights": "best.pt" if args.authors else "model.pt",
        "samples": min(
            len(train.index), 10 * args.batch_size if args.authors else len(train.index)
        ),
        "settings": settings(args),
    }
    arrays = {}

    stage("eigenvalues")
    k = max(args.top, 2) if args.landscape and args.directions == "hessian" else args.top
    values, vectors, reports = top_eigenvalues(
        net, fixed, k, args.tol, args.max_iterations, args.seed
    )
    result["eigenvalues"] = [{"value": float(v), **r} for v, r in zip(values, reports)]
    arrays["eigenvectors"] = vectors.cpu().numpy()
    stage("trace")
    mean, error, used = trace(net, train, args.probes, args.seed, 1e-3 if args.authors else 0.0)
    result["trace"] = {"value": mean, "standard_error": error, "probes": used}

    diagonals, noise, tensor = [], [], args.diagonal == "tensor"
    for k, client_net in client_nets.items():
        stage(f"diagonal of client {k}")
        d, error = diagonal(
            client_net, train if tensor else batches(run.parts[k]), args.probes, args.seed, tensor
        )
        diagonals.append(d)
        noise.append(float(error.norm() / d.norm()))
    if clients:
        # the authors' mean runs over the full matrix, where H_N is 0 and H_D 1 for k = j
        pairs = [
            (a, b)
            for i, a in enumerate(diagonals)
            for j, b in enumerate(diagonals)
            if tensor or i < j
        ]
        result["clients"] = {
            "ids": clients,
            "norms": [float(d.norm()) for d in diagonals],
            "noise": noise,
        }
        for name, f in (("H_N", hessian_norm_difference), ("H_D", hessian_direction)):
            result[name] = sum(float(f(a, b)) for a, b in pairs) / len(pairs) if pairs else None
        arrays["diagonals"] = torch.stack(diagonals).cpu().numpy()

    pictures, title = {}, f"{run.script}, {run.args.dataset}, {run.args.model}"
    if args.density:
        stage("density")
        nodes, weights = density(net, fixed, args.density, args.max_iterations, args.seed)
        arrays |= {"density_nodes": nodes, "density_weights": weights}
        pictures["density"] = lambda plt: draw_density(plt, nodes, weights, title)
    if args.landscape:
        stage("landscape")
        if args.directions == "hessian":
            (d1, d2), labels = vectors[:2], (r"$\varepsilon_0$", r"$\varepsilon_1$")
        else:
            d1, d2 = (filter_normalised(net, 2 * args.seed + i) for i in range(2))
            labels = ("direction 1", "direction 2")
        coefficients = np.linspace(-args.radius, args.radius, args.landscape)
        surface = loss_surface(net, fixed, d1, d2, coefficients)
        arrays |= {"landscape_coefficients": coefficients, "landscape_loss": surface}
        pictures["landscape"] = lambda plt: draw_surface(plt, coefficients, surface, labels, title)
    result["seconds"] = round(time.perf_counter() - started, 1)
    stage("done")
    return result, arrays, pictures


def settings(args):
    """What decides a result."""
    return {k: v for k, v in vars(args).items() if k not in ("runs", "device", "data_dir")}


def kept(path, args, rounds):
    """The result of the same analysis of the same rounds, if it lies in the folder path, else None."""
    try:
        result = json.loads((path / f"{args.name}.json").read_text())
        row(path, result)
        return result if (result["settings"], result["round"]) == (settings(args), rounds) else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def check(args):
    """{run: result, or None where it is to be computed}. UserError, before any long work, for runs of different data sets or
    with missing or damaged files, and for results that would be overwritten."""
    results, flags = {}, [common.read_config(pathlib.Path(path), "")["flags"] for path in args.runs]
    for path, own in zip(args.runs, flags):
        if own.get("dataset") != flags[0].get("dataset"):
            raise common.UserError(
                f"{path}: a run on {own.get('dataset')}, while {args.runs[0]} is on "
                f"{flags[0].get('dataset')}; Hessians are compared on one data set"
            )
        if pathlib.Path(path).resolve() in [pathlib.Path(other).resolve() for other in results]:
            raise common.UserError(f"{path}: named twice")
        results[path] = kept(pathlib.Path(path), args, own["rounds"])
        if results[path] is None:
            analysis.check_new(path, args.name, ("density", "landscape"))
    missing = [path for path, result in results.items() if result is None]
    for path in missing[1:]:  # the first is opened next
        opened(path, args)
    return results


def warn(path, result):
    """Lines about eigenvalues that are not to be trusted."""
    found, wanted = result["eigenvalues"], result["settings"]["top"]
    for i, value in enumerate(found):
        if not value["converged"]:
            tqdm.write(
                f"{path}: eigenvalue {i} has not converged after {value['iterations']} iterations "
                f"(residual {value['residual']:.2g}); raise --max-iterations"
            )
    noise = result.get("clients", {}).get("noise", [0])
    if max(noise) > 0.5:
        tqdm.write(
            f"{path}: up to {max(noise):.0%} of a client's diagonal is noise of the probes, and H_N and H_D are of it; "
            "raise --probes"
        )
    if len(found) < wanted:
        tqdm.write(
            f"{path}: eigenvalues {len(found)} to {wanted - 1} are missing; raise --max-iterations to --top at least"
        )


def row(path, result):
    """A line of the table."""
    top, tr = result["eigenvalues"][0], result["trace"]

    def number(name):
        return "" if result.get(name) is None else f"{result[name]:.4g}"

    return [
        str(path),
        result["script"],
        f"{result['accuracy']:.2f}",
        f"{top['value']:.4g}",
        f"{top['residual']:.2g}",
        f"{tr['value']:.4g} +- {tr['standard_error']:.2g}",
        number("H_N"),
        number("H_D"),
    ]


def main(argv=None):
    def landscape(text):
        points = common.number(int, 0)(text)
        if points == 1:
            raise argparse.ArgumentTypeError("takes 0, for none, or at least 2 points a side")
        return points

    parser = common.PlainParser(__doc__)
    integer, number = (lambda low: common.number(int, low)), common.number(float, 0, open_low=True)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folders of finished runs, made with --save-clients")
    add(
        "--top",
        type=integer(1),
        default=1,
        metavar="K",
        help="eigenvalues; more than one by Lanczos",
    )
    add(
        "--tol",
        type=number,
        default=1e-3,
        help="relative change of the eigenvalue at which power iteration stops, relative "
        "residual at which Lanczos does",
    )
    add(
        "--max-iterations",
        type=integer(2),
        default=100,
        help="of power iteration and Lanczos; steps of the density",
    )
    add(
        "--probes",
        type=integer(2),
        default=100,
        help="random vectors of the trace and of each client's diagonal",
    )
    add(
        "--diagonal",
        default=None,
        choices=["elementwise", "tensor", "none"],
        help="reading of Diag(H_k); none leaves H_N and H_D out; without it elementwise, with --authors tensor",
    )
    add(
        "--density",
        type=integer(0),
        default=0,
        metavar="PROBES",
        help="eigenvalue density from so many probes",
    )
    add(
        "--landscape",
        type=landscape,
        default=0,
        metavar="N",
        help="loss surface on a grid of N x N points (the paper: 41)",
    )
    add(
        "--directions",
        default="hessian",
        choices=["hessian", "filter"],
        help="of the surface: the two top eigenvectors, or random ones, filter-normalised",
    )
    add(
        "--radius",
        type=number,
        default=1.0,
        help="the surface goes from -RADIUS to RADIUS along unit vectors",
    )
    add(
        "--samples",
        type=integer(2),
        metavar="M",
        help="use M random training samples (and M of each client); without it all",
    )
    add(
        "--batch-size",
        type=integer(1),
        default=64,
        help="samples at once; does not change the result, but for the ten batches of --authors",
    )
    add("--authors", action="store_true", help="as the FedAlign code, see above")
    analysis.add_machine(parser)
    add("--seed", type=integer(0), default=0, help="of what the analysis draws")
    add(
        "--name",
        type=analysis.name,
        default="hessian",
        help="of the files written to the run folder",
    )
    args = parser.parse_args(argv)
    args.diagonal = args.diagonal or ("tensor" if args.authors else "elementwise")
    with common.one_line_errors("hessian_eval"):
        results = check(args)
        for path, result in results.items():
            if result is None:
                try:
                    with tqdm(unit="batch", disable=None) as bar:
                        results[path], arrays, pictures = analyse(path, args, bar)
                except KeyboardInterrupt:
                    tqdm.write("runs analysed so far keep their results; the same command goes on")
                    raise
                analysis.keep_analysis(path, args.name, results[path], arrays, pictures)
            else:
                tqdm.write(f"{path}: already analysed with these settings, in {args.name}.json")
            warn(path, results[path])
        head = ["run", "script", "accuracy (%)", "lambda_max", "residual", "H_T", "H_N", "H_D"]
        rows = [row(path, result) for path, result in results.items()]
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        for line in (head, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


if __name__ == "__main__":
    main()
