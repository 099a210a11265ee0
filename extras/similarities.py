"""Similarities of two layers' activations that FedCKA is compared with (its Table 3).

Each takes a, b, (batch, features each), and returns a number that is larger for more similar ones.
The paper gives neither the bandwidth of kernel CKA (here: the median squared distance) nor the
formulas of the Frobenius and cosine similarities (here: minus the mean squared difference; the
cosine of the flattened activations).
"""

import torch
import torch.nn.functional as F

import fedcka


def kernel_cka(a, b):
    """Return CKA with the kernel exp(-d^2 / (2 median d^2)), the median of all pairs a constant."""

    def gram(x):
        x = x - x.mean(0)
        squares = x.square().sum(1)
        distances = (squares[:, None] + squares - 2 * x @ x.T).clamp(min=0)
        ordered = distances.detach().flatten().sort().values
        median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        return torch.exp(-distances / (2 * median).clamp(min=1e-30))

    return fedcka.cka(gram(a), gram(b))


def frobenius(a, b):
    """Return minus the mean squared difference."""
    return -(a - b).square().mean()


def cosine(a, b):
    """Return the cosine of the two matrices as vectors."""
    return F.cosine_similarity(a.flatten(), b.flatten(), dim=0)


METRICS = {"kernel-cka": kernel_cka, "frobenius": frobenius, "cosine": cosine}
