"""From a sharded model in training to HF names and full tensors: without disk, in buckets, over any layout.

This feeds an inference engine between steps of reinforcement learning. A bucket is a buffer of a fixed size, cut into
parts: HF tensors, or rows of one that does not fit into a bucket. Which part is where follows from the config, so all
ranks know it without asking.

A rank copies the elements for which it is the primary replica to their places in a bucket of zeros. It knows them from
the boxes of its pieces, whichever of pipeline, tensor, expert and data parallelism has cut them. Then the buckets of
all ranks are summed as integers: exactly one rank wrote each element, so that the sum has its bits. Two buffers take
turns: while one is used by the caller, the other is in transit. So the memory is that of two buckets, whatever the size
of the model.

Of a model with adapters, ``stream`` says what is sent (``STREAMS``): weights with adapters merged into them, weights
without them, or adapters alone, by PEFT's names. To merge, adapters of a bucket's weights are gathered before it.

An all_reduce sends about twice the bytes that an all_gather would; with ``to``, a reduce to one rank sends half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from moefold.blueprint.flat_layout import MEBIBYTE
from moefold.blueprint.parameters import buffers
from moefold.checkpoint.hf.config_maps import family_copies, family_rules
from moefold.checkpoint.hf.hf_config import family_of
from moefold.checkpoint.hf.name_rules import HfTensor, hf_copies, hf_tensors
from moefold.checkpoint.hf.peft_adapters import peft_layout
from moefold.checkpoint.lora_weights import LiveAdapters
from moefold.checkpoint.tensor_spec import Box, inside, intersection, whole
from moefold.comm.collectives import start_all_reduce, start_reduce
from moefold.config.model import ModelConfig
from moefold.errors import ConversionError, Problem
from moefold.parallel.parallelize import LocalModel, local_buffers

DEFAULT_BUCKET = 512 * MEBIBYTE
# Parts begin at multiples of this many bytes, so that a view in any dtype is aligned.
_ALIGNMENT = 16


def _base_tensors(model: ModelConfig) -> tuple[HfTensor, ...]:
    base = replace(model, lora=None)
    family = family_of(base)
    return (*hf_tensors(family_rules(family), base), *hf_copies(family_copies(family), base))


def _adapter_tensors(model: ModelConfig) -> tuple[HfTensor, ...]:
    if model.lora is None:
        raise ConversionError(Problem("model.lora", "is null: there are no adapters to stream", "stream merged"))
    return tuple(each.hf_tensor for each in peft_layout(model).tensors)


# By name, what is sent of a model; one without adapters has the same weights merged and not merged.
STREAMS: Mapping[str, Callable[[ModelConfig], tuple[HfTensor, ...]]] = {
    "merged": _base_tensors,
    "base": _base_tensors,
    "adapters": _adapter_tensors,
}


@dataclass(frozen=True)
class BucketPart:
    """An HF tensor, or ``rows`` of its first dim, from byte ``offset`` of a bucket on."""

    hf_name: str
    dtype: torch.dtype
    # Of the whole HF tensor.
    hf_shape: tuple[int, ...]
    rows: range
    offset: int
    # What is here, as a slice of a moefold tensor.
    source: HfTensor
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is here."""
        return (len(self.rows), *self.hf_shape[1:]) if self.hf_shape else ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        return not self.hf_shape or len(self.rows) == self.hf_shape[0]

    def view(self, bucket: Tensor) -> Tensor:
        """This part of a bucket's bytes."""
        return bucket[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class WeightBucket:
    """Parts and the bytes that they are views of; both change when the next bucket is asked for."""

    parts: tuple[BucketPart, ...]
    bytes: Tensor

    def tensors(self) -> Iterator[tuple[BucketPart, Tensor]]:
        return ((part, part.view(self.bytes)) for part in self.parts)


def hf_weights(
    local_model: LocalModel,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = DEFAULT_BUCKET,
    stream: str = "merged",
) -> Iterator[tuple[str, Tensor]]:
    """All weights by HF name, cast to ``dtype`` if given; collective, every rank must exhaust the generator.

    Each tensor is a copy that the caller may keep. ``stream`` names a row of ``STREAMS``.
    """
    unfinished: dict[str, Tensor] = {}
    for bucket in weight_buckets(local_model, bucket_bytes, dtype, stream=stream):
        for part, values in bucket.tensors():
            if part.is_whole:
                yield part.hf_name, values.clone()
                continue
            full = unfinished.setdefault(part.hf_name, values.new_empty(part.hf_shape))
            full[part.rows.start : part.rows.stop] = values
            if part.rows.stop == part.hf_shape[0]:
                yield part.hf_name, unfinished.pop(part.hf_name)


def weight_buckets(
    local_model: LocalModel,
    bucket_bytes: int = DEFAULT_BUCKET,
    dtype: torch.dtype | None = None,
    to: int | None = None,
    stream: str = "merged",
) -> Iterator[WeightBucket]:
    """All weights, bucket after bucket; parameters cast to ``dtype`` if given. Collective over all ranks of the run.

    Every rank gets every bucket, or only rank ``to``; the other ranks run the loop all the same, and get none.
    """
    model = local_model.run.model
    plan = bucket_plan(model, local_model.sharding.main_dtype, bucket_bytes, dtype, stream)
    size = max(map(_end, plan))
    held, receives = _local_parts(local_model), to in (None, local_model.groups.rank)
    merging = LiveAdapters(local_model, held) if stream == "merged" and model.lora is not None else None
    source = _Source(held, merging)
    memory = [torch.empty(size // 4, dtype=torch.int32, device=local_model.device) for _ in plan[:2]]
    in_transit = _start(local_model, plan[0], memory[0], source, to)
    for number, parts in enumerate(plan):
        for work in in_transit:
            work.wait()
        if number + 1 < len(plan):
            in_transit = _start(local_model, plan[number + 1], memory[(number + 1) % 2], source, to)
        if receives:
            yield WeightBucket(parts, memory[number % 2].view(torch.uint8)[: _end(parts)])


def bucket_plan(
    model: ModelConfig,
    main: torch.dtype,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    stream: str = "merged",
) -> list[tuple[BucketPart, ...]]:
    """Which HF tensors lie where, for weights of dtype ``main`` that are cast to ``dtype`` if that is given.

    Buffers, such as the loss-free bias, are not cast.
    """
    if stream not in STREAMS:
        raise ConversionError(Problem("stream", f"{stream!r} is unknown", f"use {', '.join(STREAMS)}"))
    wide = torch.promote_types(main, torch.float32)
    of_buffers = {spec.name for spec in buffers(model)}
    plan: list[list[BucketPart]] = [[]]
    problems: list[Problem] = []
    for source in STREAMS[stream](model):
        kind = wide if source.moefold_name in of_buffers else dtype or main
        at_most = bucket_bytes // _ALIGNMENT * _ALIGNMENT
        least = _bytes_of_row(source, kind)
        if _aligned(least) > at_most:
            fix = f"set it to {_aligned(least):,} at least"
            problems.append(Problem("bucket_bytes", f"{bucket_bytes:,} is less than a row of {source.hf_name}", fix))
            continue
        for part in _parts(source, kind, at_most):
            if _end(plan[-1]) + _aligned(part.nbytes) > at_most:
                plan.append([])
            plan[-1].append(replace(part, offset=_end(plan[-1])))
    if problems:
        raise ConversionError(*problems)
    return [tuple(parts) for parts in plan if parts]


def _parts(source: HfTensor, dtype: torch.dtype, at_most: int) -> Iterator[BucketPart]:
    """The tensor as a whole, or as many of its rows at a time as fit into a bucket.

    Rows of the HF tensor go with the first of the moefold dims that are merged into its first dim.
    """
    shape = source.hf_shape
    if _aligned(prod(shape) * dtype.itemsize) <= at_most:
        yield BucketPart(source.hf_name, dtype, shape, range(shape[0] if shape else 0), 0, source, source.box)
        return
    dim = source.dims.groups[0][0]
    each = at_most // _bytes_of_row(source, dtype)
    merged = shape[0] // source.shape[dim]
    for start in range(0, source.shape[dim], each):
        stop = min(start + each, source.shape[dim])
        sizes = (*source.shape[:dim], stop - start, *source.shape[dim + 1 :])
        place = len(source.index) + dim
        box = (*source.box[:place], slice(start, stop), *source.box[place + 1 :])
        rows = range(start * merged, stop * merged)
        yield BucketPart(source.hf_name, dtype, shape, rows, 0, replace(source, shape=sizes), box)


def _bytes_of_row(source: HfTensor, dtype: torch.dtype) -> int:
    """Of the least that a bucket must hold."""
    # A first dim that the HF tensor has and moefold's has not is one row.
    merged = source.dims.groups[0] if source.shape else ()
    rows = source.shape[merged[0]] if merged else 1
    return prod(source.shape) // rows * dtype.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _end(parts: Sequence[BucketPart]) -> int:
    return _aligned(parts[-1].offset + parts[-1].nbytes) if parts else 0


# By the moefold name: boxes of the global tensor and their elements.
_LocalParts = dict[str, list[tuple[Box, Tensor]]]


class _Source(NamedTuple):
    """What this rank has; ``merging`` where adapters are added to it."""

    parts: _LocalParts
    merging: LiveAdapters | None


def _local_parts(local_model: LocalModel) -> _LocalParts:
    """What this rank writes: the boxes for which it is the primary replica, as views of the live tensors."""
    found: _LocalParts = {}
    for piece in local_model.pieces():
        if piece.is_primary:
            found[piece.name] = list(piece.by_box(piece.parameter.detach()))
    if local_model.groups["stage"].index == 0:
        live = dict(local_model.model.named_buffers())
        for spec in local_buffers(local_model.run, local_model.model):
            found[spec.name] = [(whole(spec.shape), live[spec.name].detach())]
    return found


@torch.no_grad()
def _start(
    local_model: LocalModel, parts: Sequence[BucketPart], memory: Tensor, source: _Source, to: int | None
) -> list[Work]:
    """Write this rank's elements and start the sum over ranks."""
    flat, merging = memory[: _end(parts) // 4].zero_(), source.merging
    boxes = [(part.source.moefold_name, part.box) for part in parts]
    for part, pair in zip(parts, merging.gather(boxes) if merging is not None else [None] * len(parts), strict=True):
        here = part.source.dims.from_hf(part.view(flat.view(torch.uint8)), part.source.shape)
        here = here[(None,) * len(part.source.index)]
        for box, values in source.parts.get(part.source.moefold_name, ()):
            common = intersection(box, part.box)
            if common is not None:
                mine = values[inside(common, box)]
                if merging is not None and pair is not None:
                    mine = merging.merge(mine, common, pair, part.box)
                here[inside(common, part.box)].copy_(mine)
    world = local_model.groups["world"]
    return start_all_reduce(flat, world) if to is None else start_reduce(flat, to, world)
