"""Similarities of two layers' activations that FedCKA is compared with (its Table 3).

Each takes a, b, (..., batch, features) each, and returns numbers, (...), that are larger for more
similar ones. The copy of the paper that we read has neither the bandwidth of kernel CKA (here: the
median squared distance) nor the formulas of the Frobenius and cosine similarities (here: minus the
mean squared difference; the cosine of the flattened activations).
"""

import torch
import torch.nn.functional as F

import fedcka


def kernel_cka(a, b):
    """Return CKA with the kernel exp(-d^2 / (2 median d^2)), the median of all pairs a constant."""

    def gram(x):
        products = fedcka.gram(x)
        squares = products.diagonal(dim1=-2, dim2=-1)[..., None]
        distances = (squares + squares.mT - 2 * products).clamp(min=0)
        ordered = distances.detach().flatten(-2).sort().values
        pairs = ordered.shape[-1]
        median = (ordered[..., (pairs - 1) // 2] + ordered[..., pairs // 2]) / 2
        return torch.exp(-distances / (2 * median).clamp(min=1e-30)[..., None, None])

    return fedcka.cka(a, b, gram)


def frobenius(a, b):
    """Return minus the mean squared difference."""
    return -(a - b).square().mean((-2, -1))


def cosine(a, b):
    """Return the cosine of the two matrices as vectors."""
    return F.cosine_similarity(a.flatten(-2), b.flatten(-2), dim=-1)


METRICS = {"kernel-cka": kernel_cka, "frobenius": frobenius, "cosine": cosine}
