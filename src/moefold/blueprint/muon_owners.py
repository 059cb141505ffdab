"""Which rank orthogonalises which matrix: owner-computes, dealt by the cost of Newton-Schulz, longest first.

Orthogonalising the shards of a matrix is another optimizer, not an approximation of Muon: the update must see the whole
matrix. So every matrix has one owner. The ranks that hold parts of it send their parts of the momentum there, the owner
orthogonalises once, and sends every holder its part of the answer back.

The owner is one of the holders: a matrix that is whole on one rank stays there, experts never leave the ranks of their
expert-parallel rank, and what is replicated is computed once and not by every replica. Among the holders it is dealt by
the longest-processing-time rule: the costliest matrix first, to whoever has the least work. Work is counted within a
bucket (the ranks meet in one all-to-all per bucket and direction), then in all.

Every rank computes the same owners from the layout alone. The planner reads the same loads, without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moefold.blueprint.bucket_sizes import fill_buckets
from moefold.blueprint.muon_matrices import Matrices, Spans, newton_schulz_flops

# The boxes of a parameter that each rank of a group holds, in the group's order.
HeldBoxes = tuple[tuple[Spans, ...], ...]

# A rank's share of a bucket, in elements: what it sends, orthogonalises and gets back at once.
BUCKET_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class DealtMatrix:
    """One matrix: where it lies in its parameter, who orthogonalises it, and who holds which part of it."""

    name: str
    spans: Spans
    owner: int
    # Each distinct part with the ranks that hold it: one, or all replicas.
    parts: tuple[tuple[Spans, tuple[int, ...]], ...]

    @property
    def shape(self) -> tuple[int, int]:
        (a, b), (c, d) = self.spans[-2:]
        return b - a, d - c

    @property
    def stays(self) -> bool:
        """Whether nobody but the owner holds a part."""
        return all(holders == (self.owner,) for _, holders in self.parts)

    def source(self, holders: tuple[int, ...]) -> int:
        """Which of a part's replicas sends it: the owner itself if it can, else they take turns."""
        return self.owner if self.owner in holders else holders[self.owner % len(holders)]


@dataclass(frozen=True)
class MuonParameter:
    """A parameter that Muon updates: its matrices, and who holds what of it."""

    matrices: Matrices
    held: HeldBoxes

    @property
    def name(self) -> str:
        return self.matrices.name

    def parts(self) -> dict[int, dict[Spans, list[int]]]:
        """By number of the matrix: its parts, each with the ranks that hold it."""
        found: dict[int, dict[Spans, list[int]]] = {}
        for rank, boxes in enumerate(self.held):
            for box in boxes:
                for number in self.matrices.touched(box):
                    part = intersection(box, self.matrices.spans(number))
                    found.setdefault(number, {}).setdefault(part, []).append(rank)
        return found


@dataclass(frozen=True)
class Dealing:
    """Names of parameters by bucket, the matrices of each bucket, and every rank's FLOPs of Newton-Schulz per step."""

    names: tuple[tuple[str, ...], ...]
    matrices: tuple[tuple[DealtMatrix, ...], ...]
    flops: tuple[int, ...]


def deal(parameters: Sequence[MuonParameter], iterations: int, limit: int = BUCKET_ELEMENTS) -> Dealing:
    """Parameters in buckets, and the owner of every matrix; the same on every rank of the group."""
    ranks = len(parameters[0].held) if parameters else 1
    by_name = {parameter.name: parameter for parameter in parameters}
    buckets = fill_buckets({name: each.matrices.size // ranks for name, each in by_name.items()}, limit)
    total = [0] * ranks
    dealt = tuple(_deal_bucket([by_name[name] for name in names], iterations, total) for names in buckets)
    return Dealing(tuple(map(tuple, buckets)), dealt, tuple(total))


def _deal_bucket(parameters: Sequence[MuonParameter], iterations: int, total: list[int]) -> tuple[DealtMatrix, ...]:
    """Adds to every rank's load in `total`."""
    jobs = [
        (newton_schulz_flops(*parameter.matrices.shape(number), iterations), parameter, number, parts)
        for parameter in parameters
        for number, parts in sorted(parameter.parts().items())
    ]
    load = [0] * len(total)
    found = []
    # Sorting keeps the order of jobs that cost the same.
    for cost, parameter, number, parts in sorted(jobs, key=lambda job: -job[0]):
        holders = {rank for ranks in parts.values() for rank in ranks}
        owner = min(holders, key=lambda rank: (load[rank], total[rank], rank))
        load[owner] += cost
        total[owner] += cost
        held = tuple((part, tuple(ranks)) for part, ranks in parts.items())
        found.append(DealtMatrix(parameter.name, parameter.matrices.spans(number), owner, held))
    return tuple(found)


def intersection(one: Spans, other: Spans) -> Spans:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def spans_of(box: Iterable[slice]) -> Spans:
    return tuple((part.start, part.stop) for part in box)
