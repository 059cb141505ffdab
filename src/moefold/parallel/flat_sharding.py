"""Flat sharding (ZeRO-1): weights and gradients whole, main weights and optimizer states sharded.

The buckets of `blueprint/flat_layout.py` have two buffers each: weights in the format of their all-gather
(``precision.gather``; routers in ``precision.params``), and gradients in float32. The model's parameters are views of
the first, and their ``.grad`` are views of the second, to which every backward adds in place: nothing is copied
before a collective or after it. Of every bucket this rank updates one range, in the format of main weights; where
weights have this format too, its main weights *are* its range of the weights. With ``precision.master: remainder`` they
are so as well, and the optimizer keeps the lower half of their bits. With ``precision.gather: narrow``, weights of
narrow matmuls are buckets of codes (`parallel/flat_codes.py`), and so are the model's parameters.

    start_step           gradients are zeroed; the all-gathers of all buckets start, in the order of their first use
    part_hooks           a part of the first forward waits for the buckets that it is the first to read; when the last
                         backward has left it, their reduce-scatters start, if no other stage has a backward left
    after_backward       the others of the stage start
    reduce_gradients     waits for them, and sums over replicas (hybrid sharding)
    weights_changed      main weights are rounded into this rank's range of the weights

With ``parallel.param_sync: hierarchical`` each collective has two steps (`data_sharding.FlatSync`): sums inside of the
host start as above and sums between hosts after the backward; gathers between hosts start with the step and those
inside one part before a forward needs them. Ranges are then numbered by place on the host (`blueprint/flat_layout.py`).

So both collectives run beside the first and last microbatches, also of a single stage: buckets of later layers arrive
while earlier layers go forward, and leave while these go backward. Per step a parameter is sent once as a gradient and
once as a weight, however many microbatches there are. A gradient is summed in the order of FSDP: over
data-parallel ranks here, then over partial groups and pipeline ranks (`finish_gradients`), which have the same ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import Work

from moefold.blueprint.flat_layout import (
    FlatBucket,
    FlatParameter,
    boxes_of_range,
    even_part,
    place_of_rank,
    shifted,
)
from moefold.comm.collectives import all_gather_no_grad, start_all_reduce
from moefold.comm.half_buffer import HalfBufferSum, start_half_buffer_sum
from moefold.comm.process_groups import Group, Groups
from moefold.config.precision import PrecisionConfig
from moefold.model.decoder import Decoder
from moefold.nn.matmul_policy import WeightGradQueue
from moefold.nn.phase_autograd import PartHooks
from moefold.parallel.data_sharding import FlatSync, Materialize
from moefold.parallel.flat_codes import FlatCodes, flat_codes
from moefold.parallel.param_shards import DATA_GROUPS, ParamShard, TrainedPiece
from moefold.precision.dtypes import TORCH_FORMATS
from moefold.precision.operands import NarrowWeights


@dataclass(frozen=True)
class FlatDtypes:
    """Of main weights, of gradients, and of their sums over data-parallel ranks."""

    main: torch.dtype
    gradients: torch.dtype
    reduce: torch.dtype
    # Main weights are bfloat16 weights, which the optimizer completes by a remainder.
    remainder: bool = False
    # Starts a sum; None: a reduce-scatter in ``reduce``.
    start_sum: Callable[[Tensor, int, Group], HalfBufferSum] | None = None


def flat_dtypes(precision: PrecisionConfig) -> FlatDtypes:
    """Main weights are in ``precision.master``, or in ``precision.params`` where that is None."""
    params = TORCH_FORMATS[precision.params]
    main = TORCH_FORMATS.get(precision.master, params) if precision.master is not None else params
    gradients = torch.promote_types(params, torch.float32)
    reduce, start_sum = TORCH_FORMATS[precision.reduce_format], None
    if precision.reduce == "bfloat16_all_to_all":
        start_sum = start_half_buffer_sum
    return FlatDtypes(main, gradients, reduce, precision.master == "remainder", start_sum)


@dataclass
class LiveBucket:
    """A bucket's memory, and what is under way for it."""

    layout: FlatBucket
    sync: FlatSync
    replicate: Group
    weights: Tensor
    gradients: Tensor
    # This rank's range: main weights.
    main: Tensor
    # Where weights are codes: how they are made of main weights.
    narrow: FlatCodes | None = None
    # Whether the whole weights are those of the last update, and the step inside of hosts is to come; the same on all
    # ranks.
    gathered: bool = False
    gathering: list[Work] = field(default_factory=list)
    gather_inside: bool = False
    # Stages with a backward to come; the sum starts when there is none. ``sent`` is what is summed.
    open_stages: set[int] = field(default_factory=set)
    sent: Tensor | None = None
    reducing: list[Work] = field(default_factory=list)
    half_buffer: HalfBufferSum | None = None

    @property
    def shard(self) -> Group:
        return self.sync.shard

    @property
    def owned(self) -> range:
        return self.layout.owned(self.shard.size, self.shard.index)

    @property
    def each(self) -> int:
        return even_part(self.layout.size, self.shard.size)

    @property
    def alone(self) -> bool:
        return self.shard.alone and self.replicate.alone

    def mine(self, flat: Tensor) -> Tensor:
        return flat[self.owned.start : self.owned.stop]


class FlatSharding:
    """``DataSharding`` by flat buffers."""

    def __init__(
        self,
        model: Decoder,
        groups: Groups,
        param_shards: Mapping[str, ParamShard],
        layout: Sequence[FlatBucket],
        dtypes: FlatDtypes,
        weight_grads: WeightGradQueue | None,
        narrow_weights: NarrowWeights | None = None,
    ) -> None:
        """``weight_grads`` is where the schedule defers weight gradients to, ``narrow_weights`` where matmuls find
        codes."""
        self.model, self.groups, self.param_shards = model, groups, param_shards
        self.layout, self.dtypes, self.weight_grads = layout, dtypes, weight_grads
        self.narrow_weights = narrow_weights
        self.buckets: list[LiveBucket] = []
        self._pieces: tuple[TrainedPiece, ...] = ()

    @property
    def main_dtype(self) -> torch.dtype:
        return self.dtypes.main

    def allocate(self, device: torch.device, materialize: Materialize) -> None:
        for name, buffer in list(self.model.named_buffers()):
            owner, leaf = _owner(self.model, name)
            setattr(owner, leaf, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
        self.buckets = [self._bucket(layout, device) for layout in self.layout]
        pieces: dict[str, TrainedPiece] = {}
        for bucket in self.buckets:
            for parameter in bucket.layout.parameters:
                self._set_parameter(bucket, parameter)
                piece = _piece(bucket, parameter, self.param_shards[parameter.name], self.dtypes.main)
                if piece is not None:
                    pieces[parameter.name] = piece
        self._pieces = tuple(pieces[name] for name in self.param_shards if name in pieces)

    def _bucket(self, layout: FlatBucket, device: torch.device) -> LiveBucket:
        replicate, shard = (self.groups[name] for name in DATA_GROUPS[layout.grid])
        format = TORCH_FORMATS[layout.format]
        weights = torch.empty(layout.size, dtype=format if layout.cast is None else torch.uint8, device=device)
        gradients = torch.empty(layout.size * layout.trained, dtype=self.dtypes.gradients, device=device)
        own = layout.owned(shard.size, shard.index)
        main = weights[own.start : own.stop]
        # Main weights that the optimizer completes are in the format of weights.
        main_dtype = format if self.dtypes.remainder and format == torch.bfloat16 else self.dtypes.main
        if weights.dtype != main_dtype and layout.trained:
            main = torch.empty(len(own), dtype=main_dtype, device=device)
        narrow = None if layout.cast is None else flat_codes(layout, layout.cast, shard, weights)
        sync = FlatSync(shard, None if layout.inside == 1 else self.groups.host_levels(shard.name))
        return LiveBucket(layout, sync, replicate, weights, gradients, main, narrow)

    def _set_parameter(self, bucket: LiveBucket, where: FlatParameter) -> None:
        owner, leaf = _owner(self.model, where.name)
        quantized = None if bucket.narrow is None else bucket.narrow.quantized()[where.name]
        values = _view(bucket.weights, where) if quantized is None else quantized.codes_MK
        parameter = nn.Parameter(values, requires_grad=bucket.layout.trained)
        if quantized is not None:
            assert self.narrow_weights is not None
            self.narrow_weights.gathered(parameter, quantized)
        if bucket.layout.trained:
            parameter.grad_dtype = self.dtypes.gradients
            parameter.grad = _view(bucket.gradients, where)
        setattr(owner, leaf, parameter)

    def pieces(self) -> tuple[TrainedPiece, ...]:
        return self._pieces

    @property
    def trained(self) -> list[LiveBucket]:
        """Buckets whose weights are updated; the others are gathered once after they were loaded."""
        return [bucket for bucket in self.buckets if bucket.layout.trained]

    def start_step(self) -> None:
        for bucket in self.trained:
            bucket.gradients.zero_()
            bucket.open_stages = set(bucket.layout.stages)
        self._start_gathers()

    def start_evaluation(self) -> None:
        self._start_gathers()

    def end_evaluation(self) -> None:
        """Weights stay whole."""

    @torch.no_grad()
    def _start_gathers(self) -> None:
        stale = [bucket for bucket in self.buckets if not bucket.gathered]
        for bucket in stale:
            if bucket.narrow is not None:
                bucket.narrow.start(bucket.main)
        for bucket in stale:
            if bucket.narrow is not None:
                bucket.narrow.finish(bucket.main)
            bucket.gathering = bucket.sync.start_gather(bucket.weights, bucket.each)
            bucket.gathered, bucket.gather_inside = True, bucket.sync.levels is not None

    def part_hooks(self, stage: int) -> PartHooks:
        return PartHooks(partial(self._enter_part, stage), partial(self._leave_part, stage))

    @torch.no_grad()
    def _enter_part(self, stage: int, part: int) -> None:
        """Weights of the part have arrived; those of the next one are on their way inside of the host."""
        buckets = [bucket for bucket in self.buckets if stage in bucket.layout.stages]
        for bucket in buckets:
            if bucket.gather_inside and bucket.layout.first_part(stage) <= part + 1:
                _wait(bucket.gathering)
                bucket.gathering = bucket.sync.finish_gather(bucket.weights, bucket.each)
                bucket.gather_inside = False
        for bucket in buckets:
            if bucket.layout.first_part(stage) <= part:
                _wait(bucket.gathering)

    @torch.no_grad()
    def _leave_part(self, stage: int, part: int) -> None:
        """Gradients are complete of what no earlier part of the stage reads."""
        for bucket in self.trained:
            if bucket.open_stages == {stage} and bucket.layout.first_part(stage) == part:
                self._start_sum(bucket)

    def after_backward(self, stage: int) -> None:
        closing = [bucket for bucket in self.trained if bucket.open_stages == {stage}]
        ending = [bucket for bucket in closing if bucket.sent is None]
        if self.weight_grads is not None and ending:
            self.weight_grads.run_for(self._parameters_of(ending))
        for bucket in ending:
            self._start_sum(bucket)
        for bucket in closing:
            self._finish_sum(bucket)
        for bucket in self.trained:
            bucket.open_stages.discard(stage)

    def _parameters_of(self, buckets: Iterable[LiveBucket]) -> list[nn.Parameter]:
        names = (where.name for bucket in buckets for where in bucket.layout.parameters)
        return [self.model.get_parameter(name) for name in names]

    def _start_sum(self, bucket: LiveBucket) -> None:
        bucket.sent = bucket.gradients if bucket.alone else bucket.gradients.to(self.dtypes.reduce)
        if self.dtypes.start_sum is not None and not bucket.shard.alone and bucket.sync.levels is None:
            bucket.half_buffer = self.dtypes.start_sum(bucket.sent, bucket.each, bucket.shard)
            return
        bucket.reducing = bucket.sync.start_sum(bucket.sent, bucket.each)

    def _finish_sum(self, bucket: LiveBucket) -> None:
        """Of four steps: the sum between hosts, in a narrower format if there is one (MegaScale-MoE, section 5)."""
        if bucket.sync.levels is None:
            return
        assert bucket.sent is not None
        _wait(bucket.reducing)
        if self.dtypes.start_sum is None:
            bucket.reducing = bucket.sync.finish_sum(bucket.sent, bucket.each)
            return
        of_place = bucket.sync.run_of_place(bucket.sent, bucket.each)
        bucket.half_buffer = self.dtypes.start_sum(of_place, bucket.each, bucket.sync.levels[1])

    @torch.no_grad()
    def reduce_gradients(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for bucket in self.trained:
            if bucket.sent is None:
                raise RuntimeError(f"stages {sorted(bucket.open_stages)} had no backward in this step")
        for bucket in self.trained:
            _wait(bucket.reducing)
            assert bucket.sent is not None
            bucket.sent = _own_sums(bucket, bucket.sent)
            bucket.half_buffer = None
            bucket.reducing = start_all_reduce(bucket.sent, bucket.replicate)
        for bucket in self.trained:
            _wait(bucket.reducing)
            summed, bucket.sent = bucket.sent, None
            assert summed is not None
            gradients |= _by_name(bucket, summed.to(self.dtypes.main))
        trained = [piece for piece in self._pieces if piece.parameter.requires_grad]
        for piece in trained:
            piece.parameter.grad = gradients[piece.name]
        return {piece.name: gradients[piece.name] for piece in trained}

    @torch.no_grad()
    def weights_changed(self, trained_only: bool = False) -> None:
        for bucket in self.trained if trained_only else self.buckets:
            if bucket.narrow is None and bucket.main.dtype != bucket.weights.dtype:
                bucket.mine(bucket.weights).copy_(bucket.main)
            bucket.gathered = False

    def whole_main(self, name: str) -> Tensor:
        """The main weights of one parameter, gathered over data-parallel ranks; all of these must call it."""
        bucket, where = next(
            (bucket, where) for bucket in self.buckets for where in bucket.layout.parameters if where.name == name
        )
        ranks, inside = range(bucket.shard.size), bucket.layout.inside
        ranges = [_cut(bucket.layout.owned(len(ranks), index), where) for index in ranks]
        own = ranges[bucket.shard.index]
        mine = bucket.main[own.start - bucket.owned.start : own.stop - bucket.owned.start]
        sizes = tuple(map(len, ranges))
        parts = all_gather_no_grad(mine, sizes, bucket.shard).split(sizes)
        in_order = sorted(ranks, key=lambda index: place_of_rank(len(ranks), index, inside))
        return torch.cat([parts[index] for index in in_order]).view(where.shape)


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()
    works.clear()


def _own_sums(bucket: LiveBucket, sent: Tensor) -> Tensor:
    """This rank's range of what was summed over the ranks that share the bucket."""
    if bucket.half_buffer is None:
        return bucket.mine(sent)
    sums = bucket.half_buffer.result()
    if bucket.sync.levels is None:
        return sums
    # What the last rank owns beyond its even part was summed by itself.
    return torch.cat([sums, bucket.mine(sent)[bucket.each :]])


def _view(flat: Tensor, where: FlatParameter) -> Tensor:
    return flat[where.start : where.stop].view(where.shape)


def _cut(owned: range, where: FlatParameter) -> range:
    """The part of a rank's range that lies in a parameter; empty if there is none."""
    start = min(max(owned.start, where.start), owned.stop)
    return range(start, max(start, min(owned.stop, where.stop)))


def _piece(bucket: LiveBucket, where: FlatParameter, shard: ParamShard, grad_dtype: torch.dtype) -> TrainedPiece | None:
    owned = bucket.owned
    cut = _cut(owned, where)
    if not cut:
        return None
    values = bucket.main[cut.start - owned.start : cut.stop - owned.start]
    boxes = boxes_of_range(where.shape, cut.start - where.start, cut.stop - where.start)
    parameter = nn.Parameter(values, requires_grad=bucket.layout.trained)
    if parameter.requires_grad:
        parameter.grad_dtype = grad_dtype
    return TrainedPiece(parameter, shard, shifted(boxes, shard.unsharded_box))


def _by_name(bucket: LiveBucket, mine: Tensor) -> dict[str, Tensor]:
    """This rank's range of a bucket, cut into its parameters."""
    start = bucket.owned.start
    cuts = {where.name: _cut(bucket.owned, where) for where in bucket.layout.parameters}
    return {name: mine[cut.start - start : cut.stop - start] for name, cut in cuts.items() if cut}


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf
