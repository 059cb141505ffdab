"""Which parameters Muon updates, as which matrices, and which rank orthogonalises each of them.

Muon replaces the update of a matrix by the nearest orthogonal one, so it matters what *one* matrix is. Hidden matrices
are updated by Muon, everything else by AdamW (`ALGORITHM_OF_KIND`): embedding and head, whose rows are separate
vectors; norms, biases and sinks, which are no matrices; routers, whose rows are compared with each other, and gates of
one row.

A stored parameter may be several matrices in one tensor. Each is orthogonalised by itself (`MATRIX_VIEWS`):

    experts, one by one; gate and up apart      [E, 2, F, D] is 2 E matrices [F, D]
    query, key and value projections by head    Per-Head Muon of Kimi K3; for MLA's up-projections GLM-5's Muon Split
    keys and values of MLA's up-projection      also apart in every head: two projections that share an input
    MLA's down-projection                       the latent and the shared rotated key apart
    linear attention's joint projection         by head: query, key, each value and each gate
    all others                                  whole, attention's output projection too

By head, a head with large gradients does not decide the update of the others, and Newton-Schulz is cheaper.

A view cuts every dim of the parameter into consecutive segments; the matrices are all combinations of segments, so the
matrices that a box touches are found without looking at the others.

**Owners.** Orthogonalising the shards of a matrix is another optimizer, not an approximation of Muon: the update must
see the whole matrix. So every matrix has one owner. The ranks that hold parts of it send their parts of the momentum
there, the owner orthogonalises once, and sends every holder its part of the answer back.

The owner is one of the holders: a matrix that is whole on one rank stays there, experts never leave the ranks of their
expert-parallel rank, and what is replicated is computed once and not by every replica. Among the holders it is dealt by
the longest-processing-time rule: the costliest matrix first, to whoever has the least work. Work is counted within a
bucket (the ranks meet in one all-to-all per bucket and direction), then in all. Every rank computes the same owners
from the layout alone. The planner reads the same loads, without torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import Any, Literal

from moefold.blueprint.flat_layout import fill_buckets
from moefold.blueprint.model_shape import Attention, DeltaNet, shape_of
from moefold.blueprint.parameters import ParameterSpec
from moefold.config.model import ModelConfig

Algorithm = Literal["adamw", "muon"]
# One (start, stop) per dim of a whole parameter.
Spans = tuple[tuple[int, int], ...]

# By kind of `blueprint/parameters.py`.
ALGORITHM_OF_KIND: dict[str, Algorithm] = {
    "matrix": "muon",
    "expert": "muon",
    "embedding": "adamw",
    "head": "adamw",
    "router": "adamw",
    "norm": "adamw",
    "centred_norm": "adamw",
    "bias": "adamw",
    "sink": "adamw",
    "lora_a": "adamw",
    "lora_b": "adamw",
    "conv": "adamw",
    "log_decay": "adamw",
    "decay_bias": "adamw",
}
# Of kind "matrix", but every row by itself is a gate's weights.
GATES = ("*.shared_gate.weight", "*.attention.ba.weight")


def muon_algorithm(name: str, kind: str) -> Algorithm:
    """Who updates a parameter under `optim.algorithm: muon`."""
    if any(fnmatchcase(name, pattern) for pattern in GATES):
        return "adamw"
    return ALGORITHM_OF_KIND[kind]


@dataclass(frozen=True)
class MatrixView:
    """Parameters whose name matches are blocks of rows of these sizes, repeated down the parameter."""

    pattern: str
    rows: Callable[[Any], tuple[int, ...]]
    # Whose sizes they are.
    mixer: type[Attention] | type[DeltaNet] = Attention


# The first match counts; a name without one is a whole matrix, or a stack of them along its leading dims.
MATRIX_VIEWS = (
    MatrixView("*.attention.q.weight", lambda a: (a.qk_dim,) * (1 + a.output_gate)),
    MatrixView("*.attention.k.weight", lambda a: (a.qk_dim,)),
    MatrixView("*.attention.v.weight", lambda a: (a.v_dim,)),
    MatrixView("*.attention.q_up.weight", lambda a: (a.qk_dim,)),
    MatrixView("*.attention.kv_up.weight", lambda a: (a.qk_dim - a.rope_dim, a.v_dim)),
    MatrixView("*.attention.kv_down.weight", lambda a: (a.kv_latent, a.rope_dim)),
    MatrixView(
        "*.attention.qkvz.weight", lambda d: (d.state, d.state, *(d.head_dim,) * (2 * d.heads // d.groups)), DeltaNet
    ),
)


@dataclass(frozen=True)
class Matrices:
    """The matrices of one parameter: for every dim, where its segments begin, and the dim's size at the end."""

    name: str
    edges: tuple[tuple[int, ...], ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Segments per dim."""
        return tuple(len(edges) - 1 for edges in self.edges)

    def __len__(self) -> int:
        return prod(self.counts)

    @property
    def size(self) -> int:
        """Elements of the parameter."""
        return prod(edges[-1] for edges in self.edges)

    def spans(self, number: int) -> Spans:
        """Where matrix `number` lies in the parameter; matrices count as the parameter's elements do."""
        found: list[tuple[int, int]] = []
        for edges, count in zip(reversed(self.edges), reversed(self.counts)):
            number, segment = divmod(number, count)
            found.append((edges[segment], edges[segment + 1]))
        return tuple(reversed(found))

    def shape(self, number: int) -> tuple[int, int]:
        (a, b), (c, d) = self.spans(number)[-2:]
        return b - a, d - c

    def touched(self, box: Spans) -> Iterator[int]:
        """The matrices of which this box of the parameter has elements."""
        if any(start >= stop for start, stop in box):
            return
        segments = [
            range(bisect_right(edges, start) - 1, bisect_left(edges, stop))
            for edges, (start, stop) in zip(self.edges, box, strict=True)
        ]
        for place in product(*segments):
            number = 0
            for segment, count in zip(place, self.counts):
                number = number * count + segment
            yield number


def matrices_of(spec: ParameterSpec, model: ModelConfig) -> Matrices:
    """A parameter of a model as Muon sees it: each leading dim is a stack, and rows are cut as `MATRIX_VIEWS` says."""
    *stacks, rows, columns = spec.shape
    sizes = _row_sizes(spec, model) or (rows,)
    if rows % sum(sizes):
        raise ValueError(f"{spec.name}: {rows} rows are not a multiple of blocks of {sizes}")
    row_edges = (0, *accumulate(sizes * (rows // sum(sizes))))
    return Matrices(spec.name, (*(tuple(range(size + 1)) for size in stacks), row_edges, (0, columns)))


def _row_sizes(spec: ParameterSpec, model: ModelConfig) -> tuple[int, ...]:
    view = next((view for view in MATRIX_VIEWS if fnmatchcase(spec.name, view.pattern)), None)
    if view is None:
        return ()
    shape = shape_of(model)
    blocks = (*shape.layers, *shape.mtp_layers)
    mixer = next(layer.mixer for layer in blocks if isinstance(layer.mixer, view.mixer))
    return tuple(size for size in view.rows(mixer) if size)


def newton_schulz_flops(rows: int, columns: int, iterations: int) -> int:
    """Of one matrix, whose smaller side is m and larger n: per iteration X X^T, its square, and the product with X.

    A multiplication and its addition count as two: 2 m^2 n + 2 m^3 + 2 m^2 n.
    """
    m, n = sorted((rows, columns))
    return iterations * (4 * m * m * n + 2 * m**3)


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
