"""Analyse the curvature of finished runs: why does a method work?
FedAlign (Mendieta et al., CVPR 2022), Sec. 3.4, Table 1, Fig. 1.

    lambda_max  top eigenvalue of the Hessian of the mean cross-entropy at the global model: power
                iteration, and Lanczos where that ends elsewhere, or with --top K
    H_T         its trace: Hutchinson's estimator E[v' H v], v of independent random signs
    H_N, H_D    means over pairs of clients of (||d_k|| - ||d_j||)^2 and cos(d_k, d_j),
                d_k = Diag(H_k)    (Eqs. 3, 4)
    --density   eigenvalue density by stochastic Lanczos quadrature
    --landscape loss over the two top eigenvectors, on N x N points

Hessian-vector products H v are gradients of <grad L, v>, summed over fixed batches without
augmentation. The network is in eval mode: batch norm uses its running statistics, stochastic depth
its expectation. Two readings of d_k:
    --diagonal elementwise  the paper's: E[v * H_k v], one number a parameter, H_k of client k's own
                            data at its own model; pairs k < j. Few probes leave noise in d_k, which
                            raises norms and lowers cosines: see "noise".
    --diagonal tensor       the authors' code's: its sums over each parameter tensor, on the
                            training data of all clients, averaged over all ordered pairs, k = j
                            included. Table 1's magnitudes are of this reading.
--authors takes the rest of their code's choices: best.pt instead of the final model, ten augmented
batches drawn anew for each product, --diagonal tensor, and the trace stops when its running mean
moves by less than 0.1%. Their test for that lacks an absolute value, so that a negative mean stops
it at once; ours has it. Eigenvalues, density and loss surface are of one draw of the ten batches,
since they are of one matrix; in their code the power iteration sees another one at each product.

Results go to RUN/hessian.json, arrays to RUN/hessian.npz, pictures to RUN/hessian-*.pdf. Runs need
--save-clients for H_N, H_D. The same command goes on after runs that have their results, and shows
these in its table.

    python hessian_eval.py runs/a runs/b --samples 2000 --probes 50
"""

import argparse
import contextlib
import json
import math
import pathlib
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import common
import run_folder
from analysis import runs

PICTURES = "density", "landscape"  # the keys of all
PROBE_NUMBERS = 2**25  # of probes in memory at once: 128 MB in fp32


# --- the Hessian of a network's loss


@contextlib.contextmanager
def _twice_differentiable(net):
    """Turn off the fused LSTM kernels, which cannot be differentiated twice."""
    if not any(isinstance(module, nn.RNNBase) for module in net.modules()):
        yield
        return
    enabled = torch.backends.cudnn.enabled  # its flags() cannot read our fp32_precision
    torch.backends.cudnn.enabled = False
    try:
        with torch.backends.mkldnn.flags(enabled=False):
            yield
    finally:
        torch.backends.cudnn.enabled = enabled


class Hessian:
    """The Hessian H, (n, n), of the mean of loss(net(x), y) over all samples of batches.

    With respect to the n trainable parameters of net, which stays in the mode it is in. batches:
    an iterable of (x, y), read once for each product. loss: a mean over a batch.
    """

    def __init__(self, net, batches, loss=F.cross_entropy):
        self.net = net
        self.batches = batches
        self.loss = loss
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        self.sizes = [p.numel() for p in self.parameters]
        self.n = sum(self.sizes)

    def unflatten(self, v):
        """Return v, (n,), as a list of tensors shaped as the parameters."""
        return [part.view(p.shape) for part, p in zip(v.split(self.sizes), self.parameters)]

    def tensor(self, array):
        """Return a numpy array as a tensor of the parameters' type and device."""
        return torch.from_numpy(array).to(self.parameters[0])

    def product(self, v):
        """Return H v for v of shape (n,), or (k, n): k products share each batch's first gradient.

        The result has v's shape.
        """
        rows = v.reshape(-1, v.shape[-1])
        total = torch.zeros_like(rows)
        samples = 0
        for x, y in self.batches:
            with torch.enable_grad(), _twice_differentiable(self.net):
                loss = self.loss(self.net(x), y)
                gradients = torch.autograd.grad(
                    loss, self.parameters, create_graph=True, materialize_grads=True
                )
                self._add_products(total, gradients, rows, len(y))
            samples += len(y)
        return (total / samples).view_as(v)

    def _add_products(self, total, gradients, rows, samples):
        """Add samples times the derivatives of <gradients, v> to total, (k, n), v each of rows."""
        curved = [g.requires_grad for g in gradients]  # a constant gradient has no graph
        outputs = [g for g, c in zip(gradients, curved) if c]
        if not outputs:
            return
        for i, row in enumerate(rows):
            parts = torch.autograd.grad(
                outputs,
                self.parameters,
                [d for d, c in zip(self.unflatten(row), curved) if c],
                retain_graph=i + 1 < len(rows),
                materialize_grads=True,
            )
            total[i].add_(torch.cat([part.flatten() for part in parts]), alpha=samples)

    @torch.no_grad()
    def mean_loss(self):
        """Return the mean loss over all samples."""
        total = 0.0
        samples = 0
        for x, y in self.batches:
            total = total + self.loss(self.net(x), y).double() * len(y)
            samples += len(y)
        return float(total / samples)


# --- trace and diagonal


def probe_chunks(hessian, count, seed, at_once):
    """Yield count vectors of random signs in chunks of (at most at_once, n).

    The i-th vector depends on seed and i alone.
    """
    for start in range(0, count, at_once):
        chunk = range(start, min(count, start + at_once))
        bits = [
            common.keyed("probe", seed, i).integers(2, size=hessian.n, dtype=np.int8) for i in chunk
        ]
        yield hessian.tensor(np.stack(bits)) * 2 - 1


class Estimate(NamedTuple):
    """A mean over probes, its standard error, and the number of probes."""

    mean: torch.Tensor
    error: torch.Tensor
    probes: int


def hutchinson(hessian, reduce, probes, seed=0, tol=0.0):
    """Return the Estimate of E[reduce(v * H v)] over random signs v.

    reduce: a function (k, n) -> (k, ...). probes: the most that are used. tol: stop when the
    running mean of a scalar moves by less than this share; 0 goes on to the end.
    """
    at_once = 1 if tol else max(1, PROBE_NUMBERS // hessian.n)
    mean = squares = 0.0
    used = 0
    for v in probe_chunks(hessian, probes, seed, at_once):
        for value in reduce(v * hessian.product(v)).double():
            used += 1
            previous = mean
            shift = value - mean
            mean = mean + shift / used
            squares = squares + shift * (value - mean)
        if tol and used > 1 and abs(float(mean - previous)) < tol * (abs(float(previous)) + 1e-6):
            break
    error = (squares / (used - 1) / used).sqrt() if used > 1 else torch.full_like(mean, math.nan)
    return Estimate(mean, error, used)


def trace(hessian, probes, seed=0, tol=0.0):
    """Return Hutchinson's Estimate of tr H (floats); tol: see hutchinson()."""

    def total(d):
        return d.sum(1, dtype=torch.float64)

    mean, error, used = hutchinson(hessian, total, probes, seed, tol)
    return Estimate(float(mean), float(error), used)


def diagonal(hessian, probes, seed=0, per_tensor=False):
    """Return the Estimate of Diag(H), (n,); per_tensor: of its sums over each parameter tensor."""

    def tensor_sums(d):
        parts = d.split(hessian.sizes, 1)
        return torch.stack([part.sum(1, dtype=torch.float64) for part in parts], 1)

    def unchanged(d):
        return d

    return hutchinson(hessian, tensor_sums if per_tensor else unchanged, probes, seed)


def hessian_norm_difference(d1, d2):
    """Return H_N of two clients' diagonals (FedAlign, Eq. 3)."""
    return (d1.norm() - d2.norm()).square()


def hessian_direction(d1, d2):
    """Return H_D of two clients' diagonals, a cosine (FedAlign, Eq. 4)."""
    smallest = 1e-300 if d1.dtype == torch.float64 else 1e-30
    return d1 @ d2 / (d1.norm() * d2.norm()).clamp(min=smallest)


# --- eigenvalues


def power_iteration(product, v, tol, max_iterations):
    """Return the eigenvalue of largest magnitude of a symmetric map: (value, vector, report).

    product: the map, (n,) -> (n,). v: a unit vector to start from. Stops when the Rayleigh quotient
    moves by less than the share tol. report: {iterations, residual, converged}, where the residual
    ||H v - value v|| bounds the distance to an eigenvalue, and has converged within sqrt(tol) of
    the value.
    """
    value = None
    for iteration in range(1, max_iterations + 1):
        hv = product(v)
        previous = value
        value = float(v @ hv)
        residual = float((hv - value * v).norm())
        norm = float(hv.norm())
        still = norm == 0 or previous is not None and abs(value - previous) <= tol * abs(value)
        if still or iteration == max_iterations:
            converged = still and residual <= math.sqrt(tol) * abs(value)
            return value, v, {"iterations": iteration, "residual": residual, "converged": converged}
        v = hv / norm


class Ritz(NamedTuple):
    """Approximate eigenpairs of a symmetric map after m steps of Lanczos."""

    values: np.ndarray  # (m,), ascending
    residuals: np.ndarray  # (m,), bounds of ||H v - value v||
    vectors: np.ndarray  # (m, m), columns, in the basis
    basis: torch.Tensor  # (m, n), orthonormal rows


def lanczos(product, v, steps, enough=lambda values, residuals: False):
    """Return the Ritz pairs of a symmetric map by Lanczos with full reorthogonalisation.

    product: the map, (n,) -> (n,). v: a unit vector to start from. Ends after m = steps steps, or
    when enough(values, residuals). Where the start is exhausted it goes on from a vector orthogonal
    to all before, up to n steps.
    """
    rng = common.keyed("lanczos")
    basis = v[None]
    alphas = []
    betas = []
    steps = min(steps, len(v))
    while True:
        w = product(basis[-1])
        alphas.append(float(basis[-1] @ w))
        w = _orthogonal(w, basis)
        values, vectors = np.linalg.eigh(np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1))
        beta = float(w.norm())
        if beta <= 100 * torch.finfo(v.dtype).eps * max(map(abs, values)):
            beta = 0.0
        residuals = beta * np.abs(vectors[-1])
        if len(alphas) == steps or enough(values, residuals):
            return Ritz(values, residuals, vectors, basis)
        if beta == 0:
            w = _orthogonal(torch.from_numpy(rng.standard_normal(len(v))).to(v), basis)
        betas.append(beta)
        basis = torch.cat([basis, (w / w.norm())[None]])


def _orthogonal(w, basis):
    """Return w, (n,), less its components along the rows of basis, (m, n)."""
    for _ in range(2):  # once leaves rounding errors
        w = w - basis.T @ (basis @ w)
    return w


def top_eigenvalues(hessian, k=1, tol=1e-3, max_iterations=100, seed=0):
    """Return the k largest eigenvalues of a Hessian: (values, vectors, reports).

    values: descending, (k,) float64. vectors: of unit length, (k, n). reports: for each
    {iterations, residual, converged}. For k = 1 by power iteration; if that ends at a negative
    value, or with a residual above sqrt(tol) times the value, and for k > 1, by Lanczos until
    residuals are below tol times the value. Lanczos keeps up to max_iterations vectors and may
    return fewer than k.
    """
    rng = common.keyed("start", seed)
    start = hessian.tensor(rng.standard_normal(hessian.n))
    start = start / start.norm()
    iterations = 0
    if k == 1:
        value, vector, report = power_iteration(hessian.product, start, tol, max_iterations)
        if report["residual"] <= math.sqrt(tol) * value:
            return torch.tensor([value], dtype=torch.float64), vector[None], [report]
        iterations = report["iterations"]

    def enough(values, residuals):
        return len(values) >= k and bool((residuals[-k:] <= tol * np.abs(values[-k:])).all())

    ritz = lanczos(hessian.product, start, max_iterations, enough)
    top = np.arange(len(ritz.values))[::-1][:k]
    reports = [
        {
            "iterations": iterations + len(ritz.values),
            "residual": float(ritz.residuals[i]),
            "converged": bool(ritz.residuals[i] <= tol * abs(ritz.values[i])),
        }
        for i in top
    ]
    coefficients = np.ascontiguousarray(ritz.vectors[:, top].T)
    vectors = torch.from_numpy(coefficients).to(start) @ ritz.basis
    return torch.from_numpy(ritz.values[top].copy()), vectors, reports


def density(hessian, probes, steps, seed=0):
    """Return the eigenvalue density by stochastic Lanczos quadrature: (nodes, weights).

    (probes, steps) each, a row's weights summing to one. The sum of w theta^p over a row is
    v' H^p v / n for its probe v, for p < 2 steps; its mean over probes estimates tr H^p / n.
    """
    nodes = []
    weights = []
    for chunk in probe_chunks(hessian, probes, seed, 1):
        ritz = lanczos(hessian.product, chunk[0] / chunk[0].norm(), steps)
        nodes.append(ritz.values)
        weights.append(ritz.vectors[0] ** 2)
    return np.stack(nodes), np.stack(weights)


# --- the loss around a network


class Landscape(NamedTuple):
    """Losses on a square grid along two directions."""

    coefficients: np.ndarray  # (points,)
    losses: np.ndarray  # (points, points), in nats
    labels: tuple  # of the directions


def filter_normalised(hessian, seed):
    """Return a random direction, (n,), each filter (row of a weight) as long as the network's.

    Zero for biases and normalisation layers (Li et al., NeurIPS 2018).
    """
    rng = common.keyed("filter", seed)
    parts = []
    for p in hessian.parameters:
        direction = torch.from_numpy(rng.standard_normal(tuple(p.shape))).to(p)
        if p.ndim < 2:
            parts.append(torch.zeros_like(p).flatten())
            continue
        rows = direction.flatten(1)
        lengths = p.detach().flatten(1).norm(dim=1, keepdim=True)
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30) * lengths
        parts.append(rows.flatten())
    return torch.cat(parts)


@torch.no_grad()
def loss_surface(hessian, d1, d2, coefficients):
    """Return the mean loss at w + a_i d1 + a_j d2, (points, points); w is put back afterwards.

    d1, d2: (n,). coefficients: a, (points,).
    """
    w = [p.clone() for p in hessian.parameters]
    surface = np.empty((len(coefficients),) * 2)
    try:
        for i, a in enumerate(coefficients):
            for j, b in enumerate(coefficients):
                shifts = hessian.unflatten(float(a) * d1 + float(b) * d2)
                for p, start, shift in zip(hessian.parameters, w, shifts):
                    p.copy_(start + shift)
                surface[i, j] = hessian.mean_loss()
    finally:
        for p, start in zip(hessian.parameters, w):
            p.copy_(start)
    return surface


# --- batches of a run


class Batches:
    """Batches (x, y) of training samples of a run, in a fixed order, each time it is iterated over.

    index: the samples' places in the training set. size: of a batch. bar: a tqdm bar, which
    advances by one a batch.
    """

    def __init__(self, run, index, size, bar):
        self.run = run
        self.index = np.sort(index)
        self.size = size
        self.bar = bar

    def __iter__(self):
        parts = self.split(self.index)
        return self.load(parts, [{} for _ in parts])

    @property
    def samples(self):
        """How many samples an iteration goes through."""
        return len(self.index)

    def split(self, index):
        """Return index in parts of a batch each."""
        return np.split(index, range(self.size, len(index), self.size))

    def load(self, parts, draws, seeds=None):
        """Yield a batch for each of parts, augmented by its draws, on the run's device.

        draws: of common.draw_augment(). seeds: of images that are augmented when files are decoded.
        """
        data = self.run.data
        device = data.y.device
        for part, draw, x in zip(parts, draws, data.images(parts, seeds)):
            draw = {name: torch.from_numpy(values).to(device) for name, values in draw.items()}
            x = common.apply_augment(x.to(device), draw)
            yield common.channels_last(data.normalise(x)), data.y[torch.from_numpy(part).to(device)]
            self.bar.update()


class AuthorsBatches(Batches):
    """Ten augmented batches of the samples of plain Batches, as FedAlign's code draws them.

    Anew at each iteration or, if frozen, the same ten each time.
    """

    COUNT = 10

    def __init__(self, plain, seed=0, frozen=False):
        super().__init__(plain.run, plain.index, plain.size, plain.bar)
        self.seed = seed
        self.frozen = frozen
        self.iterations = 0

    @property
    def samples(self):
        return min(len(self.index), self.COUNT * self.size)

    def __iter__(self):
        rng = common.keyed("authors", self.seed, self.iterations)
        if not self.frozen:
            self.iterations += 1
        parts = self.split(rng.permutation(self.index)[: self.samples])
        augment = common.resolve_augment(self.run.args)
        size = self.run.data.image_size if augment else None
        draws = [common.draw_augment(augment, rng, (len(part),), size) for part in parts]
        seeds = [draw.pop("seed") for draw in draws] if "seed" in augment else None
        return self.load(parts, draws, seeds)


# --- pictures


def draw_surface(plt, landscape, title):
    """Return a figure of a Landscape as a surface and as contours, on one logarithmic colour scale.

    Losses that are not finite are drawn as the largest that is.
    """
    from matplotlib.colors import LogNorm

    surface = positive(landscape.losses)
    norm = LogNorm(surface.min(), max(surface.max(), surface.min() * 1.01))
    grid = np.meshgrid(landscape.coefficients, landscape.coefficients, indexing="ij")
    steps = [f"step along {label}" for label in landscape.labels]
    figure = plt.figure(figsize=(10, 3.8))
    solid = figure.add_axes((0, 0, 0.42, 0.92), projection="3d")
    flat = figure.add_axes((0.56, 0.14, 0.32, 0.74))
    draw_solid(solid, grid, surface, plt.get_cmap("cividis")(norm(surface)))
    solid.set(xlabel=steps[0], ylabel=steps[1], zlabel=r"$\log_{10}$ loss (nats)")
    levels = np.geomspace(norm.vmin, norm.vmax, 13)
    contours = flat.contourf(*grid, surface, levels, cmap="cividis", norm=norm)
    flat.contour(*grid, surface, levels, colors="white", linewidths=0.4)
    flat.plot(0, 0, "+", color="red", markersize=9)
    flat.set(xlabel=steps[0], ylabel=steps[1], aspect="equal")
    flat.locator_params(axis="both", nbins=5)
    label = "mean cross-entropy (nats)"
    bar = figure.colorbar(contours, ax=flat, label=label, format="%.3g", ticks=levels[::2])
    bar.minorticks_off()
    figure.suptitle(title, fontsize=11)
    return figure


def draw_solid(axes, grid, surface, colours):
    """Draw the logarithm of a surface, (points, points), over a grid on 3-D axes."""
    axes.plot_surface(
        *grid,
        np.log10(surface),
        cmap="cividis",
        facecolors=colours,
        rstride=1,
        cstride=1,
        linewidth=0,
        antialiased=False,
    )
    axes.locator_params(axis="both", nbins=5)
    axes.view_init(28, -55)


def positive(losses):
    """Return losses of at least 1e-6, with the largest finite one in place of NaN and infinity."""
    finite = np.isfinite(losses)
    largest = losses[finite].max() if finite.any() else 1.0
    return np.maximum(np.where(finite, losses, largest), 1e-6)


def draw_density(plt, nodes, weights, title):
    """Return a figure of the density of density(), smoothed by a Gaussian of 1% of the range."""
    low = nodes.min()
    high = nodes.max()
    sigma = max(0.01 * (high - low), 1e-12)
    grid = np.linspace(low - 5 * sigma, high + 5 * sigma, 1000)
    kernel = np.exp(-((grid[:, None, None] - nodes) ** 2) / (2 * sigma**2))
    kernel = kernel / (sigma * math.sqrt(2 * math.pi))
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


# --- the analysis of a run


def open_networks(path, args):
    """Return (run, its global network, {client: network}): all that is read from a run folder."""
    run = runs.open_run(path, args.device, args.data_dir)
    client_nets = {}
    if args.diagonal != "none":
        client_nets = {k: run.client_net(k) for k in run.clients}
    net = run.best_net() if args.authors else run.net
    return run, net, client_nets


def weights_file(args):
    """Return the name of the file with the global model that is analysed."""
    return "best.pt" if args.authors else "model.pt"


class RunAnalysis:
    """The analysis of one run: what it is made from, and, in analysis, what has been computed."""

    def __init__(self, path, args, bar):
        """path: of the run's folder. args: the flags. bar: a tqdm bar of batches."""
        self.args = args
        self.bar = bar
        self.run, self.net, self.client_nets = open_networks(path, args)
        everyone = np.concatenate(self.run.parts)
        self.train = self.batches(everyone)
        self.hessian = Hessian(self.net, self.train)
        self.fixed_hessian = Hessian(self.net, self.batches(everyone, frozen=True))
        last = self.run.rows[-1]
        self.analysis = runs.Analysis(
            {
                "script": self.run.script,
                "round": last["round"],
                "accuracy": last["best_acc" if args.authors else "test_acc"],
                "weights": weights_file(args),
                "samples": self.train.samples,
                "settings": settings(args),
            }
        )

    def batches(self, index, frozen=False):
        """Return batches of training samples: of all, or --samples of them, or as --authors.

        frozen: the same batches each time, also as --authors.
        """
        args = self.args
        if args.samples and len(index) > args.samples:
            index = common.keyed("samples", args.seed).choice(index, args.samples, replace=False)
        batches = Batches(self.run, index, args.batch_size, self.bar)
        return AuthorsBatches(batches, args.seed, frozen) if args.authors else batches

    def stage(self, text):
        """Say on the bar what is being computed."""
        self.bar.set_description(f"{self.run.path}: {text}")

    def measure(self):
        """Compute everything that args ask for."""
        start = time.perf_counter()
        vectors = self.measure_eigenvalues()
        self.measure_trace()
        if self.client_nets:
            self.measure_diagonals()
        if self.args.density:
            self.measure_density()
        if self.args.landscape:
            self.measure_landscape(vectors)
        self.analysis.result["seconds"] = round(time.perf_counter() - start, 1)
        self.stage("done")

    def measure_eigenvalues(self):
        """Add the top eigenvalues, and return their vectors, (k, n)."""
        self.stage("eigenvalues")
        args = self.args
        along_eigenvectors = args.landscape and args.directions == "hessian"
        values, vectors, reports = top_eigenvalues(
            self.fixed_hessian,
            max(args.top, 2) if along_eigenvectors else args.top,
            args.tol,
            args.max_iterations,
            args.seed,
        )
        self.analysis.result["eigenvalues"] = [
            {"value": float(value), **report} for value, report in zip(values, reports)
        ]
        self.analysis.arrays["eigenvectors"] = vectors.cpu().numpy()
        return vectors

    def measure_trace(self):
        """Add H_T."""
        self.stage("trace")
        tol = 1e-3 if self.args.authors else 0.0
        mean, error, probes = trace(self.hessian, self.args.probes, self.args.seed, tol)
        self.analysis.result["trace"] = {"value": mean, "standard_error": error, "probes": probes}

    def measure_diagonals(self):
        """Add H_N, H_D and the clients' diagonals behind them."""
        diagonals = []
        noise = []
        for client, net in self.client_nets.items():
            self.stage(f"diagonal of client {client}")
            estimate = self.client_diagonal(client, net)
            diagonals.append(estimate.mean)
            noise.append(float(estimate.error.norm() / estimate.mean.norm()))
        self.analysis.result["clients"] = {
            "ids": list(self.client_nets),
            "norms": [float(d.norm()) for d in diagonals],
            "noise": noise,
        }
        pairs = self.pairs(diagonals)
        self.analysis.result["H_N"] = mean_over(pairs, hessian_norm_difference)
        self.analysis.result["H_D"] = mean_over(pairs, hessian_direction)
        self.analysis.arrays["diagonals"] = torch.stack(diagonals).cpu().numpy()

    def client_diagonal(self, client, net):
        """Return the Estimate of a client's diagonal, in the reading of --diagonal."""
        per_tensor = self.args.diagonal == "tensor"
        batches = self.train if per_tensor else self.batches(self.run.parts[client])
        return diagonal(Hessian(net, batches), self.args.probes, self.args.seed, per_tensor)

    def pairs(self, diagonals):
        """Return the pairs of clients' diagonals that H_N and H_D are means over.

        The authors' code takes the full matrix, where H_N is 0 and H_D 1 for k = j.
        """
        ordered = self.args.diagonal == "tensor"
        return [
            (a, b)
            for i, a in enumerate(diagonals)
            for j, b in enumerate(diagonals)
            if ordered or i < j
        ]

    def measure_density(self):
        """Add the eigenvalue density and its picture."""
        self.stage("density")
        args = self.args
        title = self.run.title
        nodes, weights = density(self.fixed_hessian, args.density, args.max_iterations, args.seed)
        self.analysis.arrays["density_nodes"] = nodes
        self.analysis.arrays["density_weights"] = weights
        self.analysis.pictures["density"] = lambda plt: draw_density(plt, nodes, weights, title)

    def measure_landscape(self, eigenvectors):
        """Add the loss surface and its picture."""
        self.stage("landscape")
        args = self.args
        title = self.run.title
        if args.directions == "hessian":
            d1, d2 = eigenvectors[:2]
            labels = (r"$\varepsilon_0$", r"$\varepsilon_1$")
        else:
            d1, d2 = (filter_normalised(self.fixed_hessian, 2 * args.seed + i) for i in range(2))
            labels = ("direction 1", "direction 2")
        coefficients = np.linspace(-args.radius, args.radius, args.landscape)
        losses = loss_surface(self.fixed_hessian, d1, d2, coefficients)
        landscape = Landscape(coefficients, losses, labels)
        self.analysis.arrays["landscape_coefficients"] = coefficients
        self.analysis.arrays["landscape_loss"] = losses
        self.analysis.pictures["landscape"] = lambda plt: draw_surface(plt, landscape, title)


def mean_over(pairs, f):
    """Return the mean of f over pairs of diagonals, None without pairs."""
    return sum(float(f(a, b)) for a, b in pairs) / len(pairs) if pairs else None


def settings(args):
    """Return the flags that decide a result, {name: value}."""
    return {k: v for k, v in vars(args).items() if k not in ("runs", "device", "data_dir")}


# --- results of several runs


def earlier_result(path, args, config):
    """Return the result of the same analysis of the same rounds in the folder path, or None."""
    try:
        result = json.loads((path / f"{args.name}.json").read_text())
        table_row(path, result)  # fails if it is damaged
        same = result["settings"] == settings(args)
        rows = runs.read_rows(path, config)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return result if same and not runs.is_stale(path, args.name, rows) else None


def check_runs(args):
    """Return {run: its earlier result, or None where it is to be computed}.

    Raises UserError, before any long work, for runs of different data sets or with missing or
    damaged files, and for results that would be overwritten.
    """
    configs = {path: run_folder.read_config(pathlib.Path(path)) for path in args.runs}
    check_distinct(args.runs)
    check_data_sets(configs)
    results = {}
    for path, config in configs.items():
        results[path] = earlier_result(pathlib.Path(path), args, config)
        if results[path] is None:
            runs.check_new(path, args.name, PICTURES)
    missing = [path for path, result in results.items() if result is None]
    for path in missing[1:]:  # the first is opened next
        open_networks(path, args)
    return results


def check_distinct(paths):
    """Raise UserError if two paths are of one folder."""
    folders = [pathlib.Path(path).resolve() for path in paths]
    for i, path in enumerate(paths):
        if folders[i] in folders[:i]:
            raise common.UserError(f"{path}: named twice")


def check_data_sets(configs):
    """Raise UserError if runs, {path: config.json}, are of different data sets."""
    datasets = {path: config["flags"].get("dataset") for path, config in configs.items()}
    first_path, first = next(iter(datasets.items()))
    for path, dataset in datasets.items():
        if dataset != first:
            raise common.UserError(
                f"{path}: a run on {dataset}, while {first_path} is on {first}; Hessians are "
                "compared on one data set"
            )


def warn(path, result):
    """Print lines about figures that are not to be trusted."""
    eigenvalues = result["eigenvalues"]
    for i, eigenvalue in enumerate(eigenvalues):
        if not eigenvalue["converged"]:
            tqdm.write(
                f"{path}: eigenvalue {i} has not converged after {eigenvalue['iterations']} "
                f"iterations (residual {eigenvalue['residual']:.2g}); raise --max-iterations"
            )
    noise = result.get("clients", {}).get("noise", [0])
    if max(noise) > 0.5:
        tqdm.write(
            f"{path}: up to {max(noise):.0%} of a client's diagonal is noise of the probes, and "
            "H_N and H_D are of it; raise --probes"
        )
    top = result["settings"]["top"]
    if len(eigenvalues) < top:
        tqdm.write(
            f"{path}: eigenvalues {len(eigenvalues)} to {top - 1} are missing; raise "
            "--max-iterations to --top at least"
        )


HEADER = ["run", "script", "accuracy (%)", "lambda_max", "residual", "H_T", "H_N", "H_D"]


def table_row(path, result):
    """Return the cells of a run's line in the table, in the order of HEADER."""
    top = result["eigenvalues"][0]
    trace_result = result["trace"]

    def cell(name):
        return "" if result.get(name) is None else f"{result[name]:.4g}"

    return [
        str(path),
        result["script"],
        f"{result['accuracy']:.2f}",
        f"{top['value']:.4g}",
        f"{top['residual']:.2g}",
        f"{trace_result['value']:.4g} +- {trace_result['standard_error']:.2g}",
        cell("H_N"),
        cell("H_D"),
    ]


def print_table(results):
    """Print a line for each run of {path: result}."""
    lines = [HEADER, *(table_row(path, result) for path, result in results.items())]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


# --- the command


def grid_points(text):
    """Return the points a side of a loss surface; an argparse type."""
    points = common.number(int, 0)(text)
    if points == 1:
        raise argparse.ArgumentTypeError("takes 0, for none, or at least 2 points a side")
    return points


def add_effort(parser):
    """Add the flags of eigenvalues and probes."""
    add = parser.add_argument
    add(
        "--top",
        type=common.number(int, 1),
        default=1,
        metavar="K",
        help="eigenvalues; more than one by Lanczos",
    )
    add(
        "--tol",
        type=common.number(float, 0, open_low=True),
        default=1e-3,
        help="relative change of the eigenvalue at which power iteration stops, relative residual "
        "at which Lanczos does",
    )
    add(
        "--max-iterations",
        type=common.number(int, 2),
        default=100,
        help="of power iteration and Lanczos; steps of the density",
    )
    add(
        "--probes",
        type=common.number(int, 2),
        default=100,
        help="random vectors of the trace and of each client's diagonal",
    )


def add_measures(parser):
    """Add the flags that say what is computed beside eigenvalues and trace."""
    add = parser.add_argument
    add(
        "--diagonal",
        choices=["elementwise", "tensor", "none"],
        help="reading of Diag(H_k); none leaves H_N and H_D out; without it elementwise, with "
        "--authors tensor",
    )
    add(
        "--density",
        type=common.number(int, 0),
        default=0,
        metavar="PROBES",
        help="eigenvalue density from so many probes",
    )
    add(
        "--landscape",
        type=grid_points,
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
        type=common.number(float, 0, open_low=True),
        default=1.0,
        help="the surface goes from -RADIUS to RADIUS along unit vectors",
    )


def add_data(parser):
    """Add the flags of the samples, and those of every analysis."""
    add = parser.add_argument
    add(
        "--samples",
        type=common.number(int, 2),
        metavar="M",
        help="use M random training samples (and M of each client); without it all",
    )
    add(
        "--batch-size",
        type=common.number(int, 1),
        default=64,
        help="samples at once; does not change the result, but for the ten batches of --authors",
    )
    add("--authors", action="store_true", help="as the FedAlign code, see above")
    add("--seed", type=common.number(int, 0), default=0, help="of what the analysis draws")
    runs.add_run_flags(parser, "hessian")


def parse_flags(argv):
    """Return the flags of argv, with the reading of the diagonal settled."""
    parser = common.PlainParser(__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folders of finished runs, made with --save-clients",
    )
    add_effort(parser)
    add_measures(parser)
    add_data(parser)
    args = parser.parse_args(argv)
    if args.diagonal is None:
        args.diagonal = "tensor" if args.authors else "elementwise"
    return args


def analyse(path, args):
    """Analyse the run in the folder path, write the results there and return the numbers."""
    try:
        with tqdm(unit="batch", disable=None) as bar:
            run_analysis = RunAnalysis(path, args, bar)
            run_analysis.measure()
    except KeyboardInterrupt:
        tqdm.write("runs analysed so far keep their results; the same command goes on")
        raise
    runs.keep_analysis(run_analysis.run, args.name, run_analysis.analysis, PICTURES)
    return run_analysis.analysis.result


def main(argv=None):
    """Analyse the runs that lack results, and print a table of all."""
    args = parse_flags(argv)
    with common.one_line_errors("hessian_eval"):
        results = check_runs(args)
        for path, result in results.items():
            if result is None:
                results[path] = analyse(path, args)
            else:
                tqdm.write(f"{path}: already analysed with these settings, in {args.name}.json")
            warn(path, results[path])
        print_table(results)


if __name__ == "__main__":
    main()
