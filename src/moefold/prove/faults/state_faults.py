"""Faults of states: flat buffers, moments and remainders, whole matrices of Muon, and activations that wait elsewhere.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

import moefold.blueprint.flat_layout
import moefold.blueprint.muon_matrices
import moefold.nn.matmul_policy
import moefold.nn.step_retention
import moefold.optim.chunked_adamw
import moefold.optim.optimizer
import moefold.parallel.data_sharding
import moefold.parallel.flat_sharding
import moefold.parallel.maxima_over_ranks
import moefold.pipeline.runtime
import moefold.pipeline.step
from moefold.blueprint.model_shape import Attention
from moefold.comm.process_groups import Group
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.nn.offload import HostBuffer, Offload, OffloadGroup, Slot
from moefold.nn.step_retention import StepRetention, get
from moefold.optim.muon_exchange import BucketPlan
from moefold.optim.newton_schulz import orthogonalise
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.data_sharding import FlatSync
from moefold.parallel.flat_sharding import FlatSharding, LiveBucket
from moefold.pipeline.runtime import first_forwards
from moefold.prove.faults.parallel_faults import put, wrap

_FLAT, _SYNC = moefold.parallel.flat_sharding, moefold.parallel.data_sharding
_LAYOUT = moefold.blueprint.flat_layout


def flat_sum_lost() -> None:
    put(_SYNC, "start_reduce_scatter", lambda flat, each, group: [])


def flat_sum_averaged() -> None:
    def make(start: Callable[..., object]) -> Callable[..., object]:
        def start_mean(flat: Tensor, each: int, group: Group) -> object:
            return start(flat.div_(group.size), each, group)

        return start_mean

    wrap(_SYNC, "start_reduce_scatter", make)


def flat_replicas_not_summed() -> None:
    put(_FLAT, "start_all_reduce", lambda flat, group: [])


def flat_weights_not_gathered() -> None:
    put(_SYNC, "start_all_gather", lambda flat, each, group: [])


def _leaving(leave: Callable[[FlatSharding, LiveBucket], None], later: int = 0) -> None:
    """What is done with a bucket when the part is left that is ``later`` than the first one that reads it."""

    def leave_part(self: FlatSharding, stage: int, part: int) -> None:
        for bucket in self.trained:
            if bucket.open_stages == {stage} and bucket.layout.first_part(stage) + later == part:
                leave(self, bucket)

    put(FlatSharding, "_leave_part", torch.no_grad()(leave_part))


def _sum_at_once(sharding: FlatSharding, bucket: LiveBucket) -> None:
    """Whatever is added later is not in it: the same on every machine."""
    sharding._start_sum(bucket)
    for work in bucket.reducing:
        work.wait()


def sum_before_the_last_gradient() -> None:
    _leaving(_sum_at_once, later=1)


def sum_of_an_earlier_backward() -> None:
    _leaving(_sum_at_once)
    put(moefold.pipeline.runtime, "plain_last_backwards", lambda actions, _: first_forwards(actions))


def late_bucket_not_summed() -> None:
    def keep(sharding: FlatSharding, bucket: LiveBucket) -> None:
        bucket.sent = bucket.gradients

    _leaving(keep)


def sum_between_hosts_lost() -> None:
    """Every host updates by the gradients of its own ranks."""
    put(FlatSync, "finish_sum", lambda self, flat, each: [])


def gather_inside_hosts_lost() -> None:
    """A rank computes with its own place's weights of all hosts, and with old ones of other places."""
    put(FlatSync, "finish_gather", lambda self, flat, each: [])


def ranges_numbered_by_host_first() -> None:
    """Four steps leave rank i of host j the j-th part of the i-th run; this is what a direct sum would leave it."""
    put(_LAYOUT, "place_of_rank", lambda ways, index, inside: index)


def host_sum_of_the_wrong_place() -> None:
    """The sum between hosts takes the run of the next rank of the host, which this rank did not sum."""

    def make(run_of_place: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def of_next(self: FlatSync, flat: Tensor, each: int) -> Tensor:
            inside, across = self.levels or (self.shard, self.shard)
            start = (inside.index + 1) % inside.size * across.size * each
            return flat[start:][: across.size * each]

        return of_next

    wrap(FlatSync, "run_of_place", make)


def _range_of_gradients(change: Callable[[LiveBucket, Tensor], Tensor]) -> None:
    def make(by_name: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
        return lambda bucket, mine: by_name(bucket, change(bucket, mine))

    wrap(_FLAT, "_by_name", make)


def bucket_boundary_off_by_one() -> None:
    _range_of_gradients(lambda bucket, mine: mine.roll(1))


def gradients_of_the_neighbour() -> None:
    """The first half of a range for the second."""
    _range_of_gradients(lambda bucket, mine: mine.roll(len(mine) // 2))


def gradient_added_twice_into_the_flat_buffer() -> None:
    def make(gradient_of: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def now_and_again(
            ctx: Any,
            weight: nn.Parameter,
            read: tuple[Tensor, tuple[Tensor, ...], list[int] | None],
            gradient_from: Callable[..., Tensor | None],
        ) -> Tensor | None:
            found = gradient_of(ctx, weight, read, gradient_from)
            if found is not None and weight.grad is not None:
                weight.grad.add_(found)
            elif found is None and isinstance(ctx.policy, ParameterMatmul) and ctx.policy.adds_to(weight):
                gradient_from(ctx.policy.operands.wgrad_amaxes(*read))
            return found

        return now_and_again

    wrap(moefold.nn.matmul_policy, "_now_or_later", make)


def norm_before_the_reduce_scatter() -> None:
    """Of this rank's own gradients of what it updates."""
    own: list[Tensor] = []

    def remember(start_sum: Callable[..., None]) -> Callable[..., None]:
        def start(self: FlatSharding, bucket: LiveBucket) -> None:
            own.append(bucket.mine(bucket.gradients).clone())
            start_sum(self, bucket)

        return start

    def make(norm_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda shards, world, device: norm_of(own, world, device)

    wrap(FlatSharding, "_start_sum", remember)
    wrap(moefold.pipeline.step, "grad_norm_of", make)


def decay_on_the_wrong_piece() -> None:
    def make(build: Callable[..., ModelOptimizer]) -> Callable[..., ModelOptimizer]:
        def build_and_shift(*given: object) -> ModelOptimizer:
            optimizer = build(*given)
            decays = [group["weight_decay"] for group in optimizer.param_groups]
            for group, decay in zip(optimizer.param_groups, decays[1:] + decays[:1], strict=True):
                group["weight_decay"] = decay
            return optimizer

        return build_and_shift

    wrap(moefold.pipeline.step, "build_optimizer", make)


def moments_of_another_piece() -> None:
    """Of the two first pieces with as many entries."""

    def make(step: Callable[..., None]) -> Callable[..., None]:
        def step_and_mix(self: ModelOptimizer, closure: None = None) -> None:
            step(self, closure)
            seen: dict[int, Tensor] = {}
            for parameter in list(self.state):
                other = seen.setdefault(parameter.numel(), parameter)
                if other is not parameter:
                    self.state[parameter], self.state[other] = self.state[other], self.state[parameter]

        return step_and_mix

    wrap(ModelOptimizer, "step", make)


def sum_before_the_last_stage() -> None:
    def make(start_step: Callable[..., None]) -> Callable[..., None]:
        def start(self: FlatSharding) -> None:
            start_step(self)
            for bucket in self.buckets:
                # Stages go backward from the last to the first.
                bucket.open_stages = {max(bucket.open_stages)}

        return start

    wrap(FlatSharding, "start_step", make)


# ---- retained steps ----


def stale_reload() -> None:
    """A host buffer that was used before still has what it had then."""
    written: list[HostBuffer] = []

    def make(copy_out: Callable[..., None]) -> Callable[..., None]:
        def first_time_only(self: Offload, slot: Slot, here: Tensor, host: HostBuffer) -> None:
            if not any(host is other for other in written):
                written.append(host)
                copy_out(self, slot, here, host)

        return first_time_only

    wrap(Offload, "_copy_out", make)


def reload_from_the_wrong_slot() -> None:
    """The first two slots of a group that have as many entries exchange their host buffers."""

    def make(ask_for: Callable[..., None]) -> Callable[..., None]:
        def ask_for_swapped(self: Offload, group: OffloadGroup) -> None:
            seen: dict[int, Slot] = {}
            for slot in group.slots() if not group.is_asked_for else ():
                other = seen.setdefault(slot.size, slot) if slot.host is not None else slot
                slot.host, other.host = other.host, slot.host
            ask_for(self, group)

        return ask_for_swapped

    wrap(Offload, "_ask_for", make)


def recomputed_from_another_microbatch() -> None:
    """The inputs of the first time that a step of this name and these sizes was recomputed."""
    first: dict[tuple[object, ...], list[Tensor]] = {}
    recipe = moefold.nn.step_retention._Recipe

    def make(run: Callable[..., None]) -> Callable[..., None]:
        def run_on_old_inputs(self: moefold.nn.step_retention._Recipe) -> None:
            inputs = [get(stored).detach() for stored in self.inputs]
            key = (self.name, *(tensor.shape for tensor in inputs))
            self.inputs = [*first.setdefault(key, [tensor.clone() for tensor in inputs])]
            run(self)

        return run_on_old_inputs

    wrap(recipe, "run", make)


def clone_of_a_discarded_step() -> None:
    """Its output has the right values, and a second graph beside the first."""

    def make(step: Callable[..., Tensor | tuple[Tensor, ...]]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        def step_twice(
            self: StepRetention, name: str, make: Callable[..., Tensor], *inputs: Tensor
        ) -> Tensor | tuple[Tensor, ...]:
            output = step(self, name, make, *inputs)
            if self.choices.get(name) != "discard" or not isinstance(output, Tensor):  # type: ignore[call-overload]
                return output
            again = make(*inputs)
            return output + (again - again.detach())

        return step_twice

    wrap(StepRetention, "step", make)


# ---- formats ----


def remainder_dropped() -> None:
    def make(split_into: Callable[..., None]) -> Callable[..., None]:
        def split_and_drop(main: Tensor, weight: Tensor, remainder: Tensor) -> None:
            split_into(main, weight, remainder)
            remainder.zero_()

        return split_and_drop

    wrap(moefold.optim.chunked_adamw, "split_into", make)


def weight_without_its_remainder() -> None:
    """The update starts from the bfloat16 weight."""
    put(moefold.optim.chunked_adamw, "join", lambda weight, remainder: weight.float())


# ---- Muon and QK-clip ----


def muon_on_a_shard() -> None:
    def orthogonalise_shards(
        self: BucketPlan, boxes: Mapping[str, Sequence[Tensor]], matrices: Sequence[Tensor], nothing: Tensor
    ) -> None:
        for matrix in matrices:
            matrix.zero_()
        for box in (box for parts in boxes.values() for box in parts if box.numel()):
            rows, columns = box.shape[-2:]
            answer_BMN = orthogonalise(box.reshape(-1, rows, columns), 5) * (0.2 * sqrt(max(rows, columns)))
            box.copy_(answer_BMN.view(box.shape))

    put(BucketPlan, "gather", orthogonalise_shards)
    put(BucketPlan, "scatter", lambda self, boxes, matrices, nothing: None)


def heads_orthogonalised_together() -> None:
    put(moefold.blueprint.muon_matrices, "MATRIX_VIEWS", ())


def answers_of_muon_not_sent_back() -> None:
    """Holders other than the owner apply their momentum as it is."""

    def make(exchange: Callable[..., None]) -> Callable[..., None]:
        def scatter(
            self: BucketPlan, boxes: Mapping[str, Sequence[Tensor]], matrices: Sequence[Tensor], nothing: Tensor
        ) -> None:
            travels, self.travels = self.travels, False
            exchange(self, boxes, matrices, nothing)
            self.travels = travels

        return scatter

    wrap(BucketPlan, "scatter", make)


def logits_of_this_rank_only() -> None:
    put(moefold.parallel.maxima_over_ranks, "all_reduce_max", lambda maxima, group: maxima)


def keys_clipped_by_one_of_their_heads() -> None:
    """By the first of the query heads that share a key, and not by the one with the largest logit."""

    def gammas_of_the_first(max_LH: Tensor, bound: float, attention: Attention) -> Tensor:
        first_LJ = max_LH.unflatten(1, (attention.kv_heads, -1))[..., 0]
        return torch.where(first_LJ > bound, bound / first_LJ, 1.0)

    put(moefold.pipeline.step, "gammas", gammas_of_the_first)
