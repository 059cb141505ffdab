"""Flat buffers of ZeRO-1: which parameters lie in which bucket, where, and which range of it each rank owns.

A bucket is one run of elements that is reduced and gathered by one collective. Its parameters are of one grid (dense
ones are summed over dp x cp, experts over edp), have one format (or are gathered as codes of one cast), and are used by
the same stages of this rank: they are needed at the same time, and complete at the same time. A parameter on several
pipeline ranks has a bucket to itself, so that all of these ranks cut it alike. Frozen parameters have buckets of their
own, which have no gradients.

Nothing is padded. Inside a bucket, parameters whose size is a multiple of ``ALIGNMENT`` come first, so that matrices
start at 16-byte addresses, as GPUs' matmuls want them. Of N elements each of n ranks owns N / n, rounded down to a
multiple of ``ALIGNMENT``, so that ranges start aligned too; the last rank owns what is left as well, fewer
than n ALIGNMENT elements.

Where gradients are summed inside of hosts first and then between them (``parallel.param_sync: hierarchical``), the
first sum leaves the i-th rank of every host the i-th run of the bucket, and the second cuts that run over hosts. So
ranges are numbered by the rank's place on its host, then by the host (``place_of_rank``). It is the only difference.

A range may cut a parameter anywhere. In a row-major tensor it is a few boxes (``boxes_of_range``): checkpoints store
boxes, and any other layout reads them.

`fill_buckets` is the rule by which every reduction of gradients, flat or not, is divided into collectives: the step and
the planner both follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from moefold.blueprint.parameters import ParameterSpec
from moefold.blueprint.sharding import grid_of, local_shape
from moefold.blueprint.stage_modules import Parts, first_part, parts_of
from moefold.blueprint.stages import StageSpec
from moefold.config.casts import ELEMENT_BITS, Cast
from moefold.config.model import ModelConfig
from moefold.config.precision import BYTES, KeptFormat, PrecisionConfig
from moefold.topology.folded_layout import FoldedLayout, GridName, ranks_inside

MEBIBYTE = 1 << 20


def fill_buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names from the smallest to the largest, in buckets of at most ``limit`` bytes; one that is larger has its own.

    >>> fill_buckets({"b": 3, "a": 4, "c": 9, "d": 1}, 8)
    [['d', 'b', 'a'], ['c']]
    """
    buckets: list[list[str]] = []
    held = 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        if not buckets or held + sizes[name] > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(name)
        held += sizes[name]
    return buckets


Box = tuple[slice, ...]

# In elements: 16 bytes of bfloat16.
ALIGNMENT = 8


@dataclass(frozen=True)
class FlatParameter:
    """``shape`` is what tensor and expert parallelism leave to this rank; ``start`` is the offset in the bucket."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class FlatBucket:
    """``stages`` are those of this rank that use its parameters; ``format`` is that of the whole weights, unless they
    are codes of ``cast``, under a scale per block of every parameter."""

    grid: GridName
    format: KeptFormat
    stages: tuple[int, ...]
    parameters: tuple[FlatParameter, ...]
    trained: bool = True
    cast: Cast | None = None
    # Of the ranks that share the bucket, how many are on a host; 1 where hosts make no difference to who owns what.
    inside: int = 1
    # Of each of its stages, the number of the first part that reads any of its parameters.
    first_parts: tuple[int, ...] = ()

    def first_part(self, stage: int) -> int:
        return self.first_parts[self.stages.index(stage)]

    @property
    def element_bytes(self) -> int:
        """Of an element of the whole weights."""
        return BYTES[self.format] if self.cast is None else ELEMENT_BITS[self.cast.element] // 8

    @property
    def num_scales(self) -> int:
        return 0 if self.cast is None else sum(prod(self.cast.scale_shape(each.shape)) for each in self.parameters)

    @property
    def size(self) -> int:
        return self.parameters[-1].stop

    def owned(self, ways: int, index: int) -> range:
        """The elements that rank ``index`` of ``ways`` updates."""
        return owned_range(self.size, ways, place_of_rank(ways, index, self.inside))


def owned_range(size: int, ways: int, index: int) -> range:
    """
    >>> [owned_range(45, 2, rank) for rank in range(2)]
    [range(0, 16), range(16, 45)]
    """
    each = even_part(size, ways)
    return range(index * each, size if index == ways - 1 else (index + 1) * each)


def place_of_rank(ways: int, index: int, inside: int) -> int:
    """Which range rank ``index`` owns, with ``inside`` neighbouring ranks on each host.

    >>> [place_of_rank(6, rank, 3) for rank in range(6)]
    [0, 2, 4, 1, 3, 5]
    """
    return index % inside * (ways // inside) + index // inside


def even_part(size: int, ways: int) -> int:
    """What every rank but the last owns of a bucket."""
    return size if ways == 1 else size // (ways * ALIGNMENT) * ALIGNMENT


def flat_buckets(
    model: ModelConfig,
    precision: PrecisionConfig,
    layout: FoldedLayout,
    held: Iterable[tuple[ParameterSpec, bool]],
    stages: Sequence[StageSpec],
    limit: int,
    trained: Callable[[str], bool] = lambda name: True,
    casts: Mapping[str, Cast] | None = None,
    ranks_per_host: int = 1,
) -> tuple[FlatBucket, ...]:
    """The buckets of a rank, in the order in which its stages need them.

    ``held``: its parameters, each with whether other pipeline ranks have it too. ``stages``: its stages. ``limit``: at
    most this many elements per bucket; a larger parameter has its own. ``trained``: which parameters, by name.
    ``casts``: of weights that are gathered as codes. ``ranks_per_host``: for sums inside of hosts first.
    """
    casts = casts or {}
    by_index = {stage.index: stage for stage in stages}
    parts = {index: parts_of((stage,), model) for index, stage in by_index.items()}
    groups: dict[tuple[tuple[int, ...], GridName, KeptFormat, bool, str, Cast | None], list[ParameterSpec]] = {}
    for spec, shared in held:
        users, kept = stages_using(spec.name, parts), weight_format(spec, precision)
        key = (users, grid_of(spec.name), kept, trained(spec.name), spec.name * shared, casts.get(spec.name))
        groups.setdefault(key, []).append(spec)
    found = []
    for (users, grid, kept, updated, _, cast), specs in groups.items():
        for names in _filled({spec.name: local_shape(spec, layout) for spec in specs}, limit):
            group = "expert_shard" if grid == "expert" else "dense_shard"
            inside = ranks_inside(layout, group, ranks_per_host) or 1
            firsts = tuple(min(first_part(name, by_index[user]) for name in names) for user in users)
            found.append(FlatBucket(grid, kept, users, _placed(names), updated, cast, inside, firsts))
    return tuple(sorted(found, key=lambda bucket: bucket.stages))


def stages_using(name: str, parts: dict[int, Parts]) -> tuple[int, ...]:
    return tuple(stage for stage, of_stage in parts.items() if of_stage.holds(name))


def weight_format(spec: ParameterSpec, precision: PrecisionConfig) -> KeptFormat:
    """Of the whole weights: as they are gathered; routers compute in float32 and stay in ``precision.params``."""
    return precision.params if "router" in spec.name.split(".") else precision.gather_format


def _filled(shapes: dict[str, tuple[int, ...]], limit: int) -> list[dict[str, tuple[int, ...]]]:
    """In the order of the forward, which is that of ``shapes``."""
    buckets: list[dict[str, tuple[int, ...]]] = []
    used = 0
    for name, shape in shapes.items():
        if not buckets or used + prod(shape) > limit:
            buckets.append({})
            used = 0
        buckets[-1][name] = shape
        used += prod(shape)
    return buckets


def _placed(shapes: dict[str, tuple[int, ...]]) -> tuple[FlatParameter, ...]:
    aligned = sorted(shapes, key=lambda name: prod(shapes[name]) % ALIGNMENT > 0)
    placed: list[FlatParameter] = []
    for name in aligned:
        placed.append(FlatParameter(name, shapes[name], placed[-1].stop if placed else 0))
    return tuple(placed)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The elements start..stop of a row-major tensor as boxes, in order; at most 2 * dims - 1 of them.

    >>> for box in boxes_of_range((3, 4), 2, 9):
    ...     print([(part.start, part.stop) for part in box])
    [(0, 1), (2, 4)]
    [(1, 2), (0, 4)]
    [(2, 3), (0, 1)]
    """
    if start >= stop:
        return ()
    if len(shape) <= 1:
        return ((slice(start, stop),) if shape else (),)
    inner = prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        return _row(shape, first, start - first * inner, stop - first * inner)
    whole_from, whole_to = -(-start // inner), stop // inner
    middle = (slice(whole_from, whole_to), *(slice(0, size) for size in shape[1:]))
    return (
        *(_row(shape, first, start - first * inner, inner) if whole_from > first else ()),
        *((middle,) if whole_from < whole_to else ()),
        *(_row(shape, last, 0, stop - last * inner) if whole_to <= last else ()),
    )


def _row(shape: Sequence[int], index: int, start: int, stop: int) -> tuple[Box, ...]:
    return tuple((slice(index, index + 1), *box) for box in boxes_of_range(shape[1:], start, stop))


def shifted(boxes: Iterable[Box], corner: Box) -> tuple[Box, ...]:
    """Boxes relative to the corner of another, in the coordinates of the tensor that this one is a box of."""
    return tuple(
        tuple(slice(part.start + at.start, part.stop + at.start) for part, at in zip(box, corner, strict=True))
        for box in boxes
    )
