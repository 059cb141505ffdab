"""How far a rank's numbers are from the reference's.

Each rank compares the part it holds. Differences are measured against the size of the whole reference tensor, so a
small entry of a large tensor is not asked for more digits than its neighbours have. Some gradients are zero by
mathematics and rounding noise in practice (a router's, when every token has one choice of weight one): they are
measured against a small fraction of the model's largest gradient instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Gradients below this share of the model's largest entry count as zero up to rounding.
_NOISE = 1e-6


@dataclass(frozen=True)
class Difference:
    """One rank's view of one quantity: what it compared, and whether it speaks for that part in sums."""

    largest: float
    squares: float
    elements: int
    is_primary: bool


@dataclass(frozen=True)
class Yardstick:
    """The size of a reference tensor."""

    largest: float
    squares: float
    elements: int


def difference(ours: Tensor, expected: Tensor, is_primary: bool) -> Difference:
    if ours.shape != expected.shape:
        return Difference(float("inf"), float("inf"), ours.numel(), is_primary)
    gap = ours.double() - expected.double()
    if gap.numel() == 0:
        return Difference(0.0, 0.0, 0, is_primary)
    largest = gap.abs().max().item()
    # A NaN on either side is a failure, and must not vanish in a comparison.
    return Difference(
        largest if largest == largest else float("inf"), gap.square().sum().item(), gap.numel(), is_primary
    )


def yardstick(expected: Tensor) -> Yardstick:
    wide = expected.double()
    largest = wide.abs().max().item() if wide.numel() else 0.0
    return Yardstick(largest, wide.square().sum().item(), wide.numel())


def floors(sizes: dict[str, Yardstick]) -> dict[str, float]:
    """By kind of quantity, the size below which a tensor is measured against the model instead of itself."""
    largest = max((size.largest for name, size in sizes.items() if name.startswith("gradient/")), default=0.0)
    first = _NOISE * largest
    return {"gradient": first, "exp_avg": 0.1 * first, "exp_avg_sq": 0.05 * first * first}


def relative_error(differences: list[Difference], size: Yardstick, floor: float) -> float:
    """The largest difference on any rank, relative to the reference's largest entry."""
    worst = max((item.largest for item in differences), default=float("inf"))
    if worst == 0.0:
        return 0.0
    return worst / max(size.largest, floor, 1e-300)


def relative_norm_error(differences: list[Difference], size: Yardstick, floor: float) -> float:
    """The norm of all differences, each element once, relative to the reference's norm."""
    total = sum(item.squares for item in differences if item.is_primary)
    if total == 0.0:
        return 0.0
    return (total / max(size.squares, floor * floor * size.elements, 1e-300)) ** 0.5


def uncovered(differences: list[Difference], size: Yardstick) -> int:
    """Elements that no rank speaks for, or that several do; 0 when the parts are a partition."""
    return size.elements - sum(item.elements for item in differences if item.is_primary)
