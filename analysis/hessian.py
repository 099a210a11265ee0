"""The Hessian of a network's mean loss: products, trace, diagonal, eigenvalues and their density.

It needs PyTorch and NumPy alone, and no run:

    hv = functools.partial(hvp, net, [(x, y), ...])
    w = flatten(trainable(net))
    top_eigenpairs(hv, torch.randn_like(w))
    hutchinson(hv, random_signs(w, 100), lambda d: d.sum(1))  # the trace
    hutchinson(hv, random_signs(w, 100))  # the diagonal
"""

import contextlib
import functools

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def trainable(net):
    """Return the parameters with respect to which the Hessian is taken."""
    return [p for p in net.parameters() if p.requires_grad]


def flatten(tensors):
    """Return the numbers of all tensors as one vector, (n,)."""
    return torch.cat([t.flatten() for t in tensors])


@contextlib.contextmanager
def twice_differentiable(net):
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


def hvp(net, batches, v, loss=F.cross_entropy):
    """Return H v, by the gradient of <gradient, v>; of v's shape, (n,), or (k, n) for k products.

    H is the Hessian of the mean of loss(net(x), y) over all samples of batches, an iterable of
    (x, y) that is read once; k products share each batch's gradient. loss: a mean over a batch."""
    grad = functools.partial(torch.autograd.grad, inputs=trainable(net), materialize_grads=True)
    rows = v.reshape(-1, v.shape[-1])
    total, samples = torch.zeros_like(rows), 0
    for x, y in batches:
        with torch.enable_grad(), twice_differentiable(net):
            gradient = flatten(grad(loss(net(x), y), create_graph=True))
            for i, row in enumerate(rows if gradient.requires_grad else ()):  # else it is constant
                parts = grad(gradient, grad_outputs=row, retain_graph=i + 1 < len(rows))
                total[i].add_(flatten(parts), alpha=len(y))
        samples += len(y)
    return (total / samples).view_as(v)


def random_signs(w, count, seed=0, at_once=1):
    """Yield count vectors like w, (n,), of random signs, in chunks of (at most at_once, n).

    The i-th vector depends on seed and i alone."""
    for start in range(0, count, at_once):
        chunk = range(start, min(count, start + at_once))
        rngs = [np.random.default_rng([*b"probe", seed, i]) for i in chunk]
        bits = np.stack([rng.integers(2, size=len(w), dtype=np.int8) for rng in rngs])
        yield torch.from_numpy(bits).to(w) * 2 - 1


def hutchinson(product, probes, reduce=lambda d: d, tol=0.0):
    """Estimate E[reduce(v * H v)] over random signs v: (mean, standard error, how many probes).

    probes: chunks of random signs, (k, n). reduce: float64 (k, n) -> (k, ...); if not given the
    diagonal is estimated. tol: end when the sum of the running mean moves by less than this share.
    """
    mean, squares, used = 0.0, 0.0, 0
    for v in probes:
        for value in reduce((v * product(v)).double()):
            used += 1
            before, shift = mean, value - mean
            mean = mean + shift / used
            squares = squares + shift * (value - mean)
        if tol and used > 1 and (mean - before).sum().abs() < tol * (before.sum().abs() + 1e-6):
            break
    return mean, (squares / (used - 1) / used).sqrt(), used


def lanczos(product, v, steps, enough=lambda values, residuals: False):
    """Return Ritz pairs of a symmetric map by Lanczos with full reorthogonalisation.

    product: the map, (n,) -> (n,). v: where it starts. It ends after so many steps, or when
    enough(values, residuals), or when the products of v span no more. Of m steps it returns the
    values, ascending; their residuals, which bound ||H u - value u||; the vectors, columns of
    (m, m), in a basis; and the basis, m orthonormal vectors, (n,)."""
    basis, alphas, betas = [v / v.norm()], [], []
    while True:
        w = product(basis[-1])
        alphas.append(float(basis[-1] @ w))
        for q in basis * 2:  # once leaves rounding errors
            w = w - (q @ w) * q
        values, vectors = np.linalg.eigh(np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1))
        beta = float(w.norm())
        residuals = beta * np.abs(vectors[-1])
        exhausted = beta <= 100 * torch.finfo(v.dtype).eps * np.abs(values).max()
        if exhausted or len(alphas) == steps or enough(values, residuals):
            return values, residuals, vectors, basis
        betas.append(beta)
        basis.append(w / beta)


def top_eigenpairs(product, v, k=1, tol=1e-3, steps=100):
    """Return the k largest eigenvalues, descending, vectors, (k, n), residuals, and the steps.

    By Lanczos from v, (n,), until each residual is at most tol times its value. It keeps a vector a
    step, and finds fewer than k eigenvalues where it ends before."""

    def enough(values, residuals):
        return len(values) >= k and (residuals[-k:] <= tol * np.abs(values[-k:])).all()

    values, residuals, vectors, basis = lanczos(product, v, steps, enough)
    top = slice(None, -k - 1, -1)
    coefficients = torch.from_numpy(vectors[:, top].copy()).to(v)
    eigenvectors = sum(torch.outer(c, q) for c, q in zip(coefficients, basis))
    return values[top], eigenvectors, residuals[top], len(basis)


def density(product, probes, steps):
    """Return the eigenvalue density by stochastic Lanczos quadrature: (nodes, weights).

    probes: chunks of one vector, (1, n). Both are (probes, at most steps), the weights of a row
    summing to one: the sum of w theta^p over it is v' H^p v / v' v for its probe v, p < 2 steps."""
    nodes, weights = [], []
    for v in probes:
        values, _, vectors, _ = lanczos(product, v[0], steps)
        width = 0, min(steps, v.shape[1]) - len(values)
        nodes.append(np.pad(values, width, "edge"))
        weights.append(np.pad(vectors[0] ** 2, width))
    return np.stack(nodes), np.stack(weights)
