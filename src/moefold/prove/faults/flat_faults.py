"""Faults of flat sharding: ranges of buffers, sums and gathers that go wrong, and states of the wrong piece.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import moefold.nn.matmul_policy
import moefold.optim.optimizer
import moefold.parallel.flat_sharding
import moefold.pipeline.step
from moefold.comm.process_groups import Group
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.flat_sharding import FlatSharding, LiveBucket
from moefold.prove.faults.parallel_faults import put, wrap

_FLAT = moefold.parallel.flat_sharding


def flat_sum_lost() -> None:
    put(_FLAT, "start_reduce_scatter", lambda flat, each, group: [])


def flat_sum_averaged() -> None:
    def make(start: Callable[..., object]) -> Callable[..., object]:
        def start_mean(flat: Tensor, each: int, group: Group) -> object:
            return start(flat.div_(group.size), each, group)

        return start_mean

    wrap(_FLAT, "start_reduce_scatter", make)


def flat_replicas_not_summed() -> None:
    put(_FLAT, "start_all_reduce", lambda flat, group: [])


def flat_weights_not_gathered() -> None:
    put(_FLAT, "start_all_gather", lambda flat, each, group: [])


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
        def now_and_again(ctx: Any, weight: nn.Parameter, gradient: Callable[[], Tensor | None]) -> Tensor | None:
            found = gradient_of(ctx, weight, gradient)
            if found is not None and weight.grad is not None:
                weight.grad.add_(found)
            elif found is None and isinstance(ctx.policy, ParameterMatmul) and ctx.policy.adds_to(weight):
                gradient()
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
