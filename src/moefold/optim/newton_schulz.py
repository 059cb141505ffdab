"""Newton-Schulz iterations: the nearest orthogonal matrix by matmuls alone.

For G = U S V^T, Muon's update is the orthogonal polar factor U V^T: the same singular vectors, every singular value 1.
An odd polynomial of the matrix acts on its singular values alone, so that iterating

    X <- a X + b (X X^T) X + c (X X^T)^2 X        that is  s <- a s + b s^3 + c s^5

from X = G / |G| (Frobenius, so that all singular values are at most 1) moves all of them towards 1, without a
singular value decomposition. The published coefficients are made for few iterations in low precision. They trade the
limit for speed, so after five iterations singular values lie in a band about 1 (`COEFFICIENTS`):

    quintic         Jordan et al. 2024, also Moonlight and Kimi K2: one triple for all iterations, 0.68 to 1.21
    you             You 2025: five triples, tuned together, 0.97 to 1.15
    polar_express   Amsel et al. 2025: the minimax polynomial of every iteration, 0.87 to 1.13; with more iterations,
                    all the way to 1

These bands are for singular values of at least 0.003 |G|; smaller ones have not arrived after five iterations.

The iterations run on the smaller side: a tall matrix is transposed first. They are batched over leading dims by `bmm`,
which gives a matrix the same bits in a batch of any size, so that a layout does not change the update.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.config.optim import NewtonSchulzCoefficients

Triple = tuple[float, float, float]

# Amsel et al. divide the norm and every polynomial but the last by this, so that rounding cannot push a singular value
# above 1.
_SAFETY = 1.01
_POLAR: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
)


class Polynomials(NamedTuple):
    """One triple (a, b, c) per iteration, the last one repeated, and a factor on the norm that G is divided by."""

    triples: tuple[Triple, ...]
    norm_factor: float = 1.0


COEFFICIENTS: dict[NewtonSchulzCoefficients, Polynomials] = {
    "quintic": Polynomials(((3.4445, -4.7750, 2.0315),)),
    "you": Polynomials(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    "polar_express": Polynomials(
        (*((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR), (1.875, -1.25, 0.375)), _SAFETY
    ),
}
# A matrix of zeros stays zero.
_EPS = 1e-30


@torch.no_grad()
def orthogonalise(matrices_BMN: Tensor, iterations: int, coefficients: NewtonSchulzCoefficients = "quintic") -> Tensor:
    """[B, M, N]: about U V^T of every matrix, in the dtype that it comes in."""
    triples, norm_factor = COEFFICIENTS[coefficients]
    tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x_BMN = (matrices_BMN.mT if tall else matrices_BMN).contiguous()
    x_BMN = x_BMN / (_norms(x_BMN) * norm_factor).clamp_min(_EPS)
    for iteration in range(iterations):
        a, b, c = triples[min(iteration, len(triples) - 1)]
        gram_BMM = torch.bmm(x_BMN, x_BMN.mT)
        poly_BMM = torch.bmm(gram_BMM, gram_BMM).mul_(c).add_(gram_BMM * b)
        x_BMN = torch.bmm(poly_BMM, x_BMN).add_(x_BMN * a)
    return x_BMN.mT if tall else x_BMN


def _norms(x_BMN: Tensor) -> Tensor:
    """[B, 1, 1]: Frobenius norms, summed at least in float32; each matrix by itself, so that no batch changes its
    bits."""
    wide = torch.promote_types(x_BMN.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(x_MN, dtype=wide) for x_MN in x_BMN.unbind()]
    return torch.stack(norms).to(x_BMN.dtype)[:, None, None] if norms else x_BMN.new_empty(0, 1, 1)
