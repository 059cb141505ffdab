"""One optimizer step on one rank's share: gradients of every microbatch, one norm, one bounded update.

M mixtures of the model, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.process_groups import Groups
from moefold.model.decoder import Decoder
from moefold.moe.load_balancing import BalanceLosses, update_expert_bias
from moefold.nn.batch import Batch
from moefold.optim.grad_norm import clip_gradients, grad_norm_of
from moefold.parallel.fsdp import reduce_for_step, reshard_all, unshard_for_step
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import ParamShard, finish_gradients
from moefold.pipeline.pipeline_state import StepSums
from moefold.pipeline.runtime import OnAction, no_action_callback, run_forward_only, run_schedule


class StepResult(NamedTuple):
    """``skipped`` says why the update was not taken; then nothing has changed."""

    sums: StepSums
    grad_norm: Tensor
    skipped: str | None = None


# Sees the gradients before they are clipped.
Look = Callable[[dict[str, Tensor]], None]
# Asked with the step's sums and norm, which all ranks hold alike: a reason not to take the step, or None.
SkipReason = Callable[[StepSums, Tensor], str | None]


def ignore_gradients(gradients: dict[str, Tensor]) -> None:
    """Does not want to see them."""


def never(sums: StepSums, grad_norm: Tensor) -> None:
    """Has no objection."""


def run_step(
    local_model: LocalModel,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    look: Look = ignore_gradients,
    skip_reason: SkipReason = never,
    on_action: OnAction = no_action_callback,
) -> StepResult:
    """Forward and backward over ``batches``, then one clipped update and the loss-free bias's move."""
    optimizer.zero_grad()
    if local_model.reshard_per_step:
        unshard_for_step(local_model.model)
    sums = over_ranks(run_schedule(local_model, batches, on_action), local_model.groups)
    if local_model.reshard_per_step:
        reduce_for_step(local_model.model, local_model.groups)
    gradients = finish_gradients(local_model.model, local_model.param_shards, local_model.groups["pp"])
    look(gradients)
    grad_norm = grad_norm_of(primary_shards(gradients, local_model.param_shards), local_model.groups["world"])
    if (reason := skip_reason(sums, grad_norm)) is not None:
        return StepResult(sums, grad_norm, reason)
    clip_gradients(gradients.values(), grad_norm, local_model.run.optim.clip_norm)
    optimizer.step()
    move_expert_biases(local_model.model, sums.kept_ME)
    return StepResult(sums, grad_norm)


def evaluate(local_model: LocalModel, batches: Sequence[Batch]) -> Tensor:
    """The loss per label of these batches, on every rank; nothing is kept and nothing changes."""
    training = local_model.model.training
    local_model.model.eval()
    try:
        if local_model.reshard_per_step:
            unshard_for_step(local_model.model)
        sums = over_ranks(run_forward_only(local_model, batches), local_model.groups)
        reshard_all(local_model.model)
    finally:
        local_model.model.train(training)
    return sums.loss


def primary_shards(gradients: dict[str, Tensor], param_shards: dict[str, ParamShard]) -> list[Tensor]:
    """The parts that enter the norm here; whatever several ranks repeat enters on one of them."""
    return [gradient for name, gradient in gradients.items() if param_shards[name].is_primary]


def over_ranks(sums: StepSums, groups: Groups) -> StepSums:
    """Tensor-parallel ranks all hold their tokens' whole loss, but each only its own tokens' balance and counts.

    Each of them adds up its own: a loss that is wrong on one of them alone must not be overlooked.
    """
    world = groups["world"]
    losses = torch.stack((sums.loss, sums.ahead))
    for axis in ("dp", "cp", "pp"):
        losses = all_reduce_no_grad(losses, groups[axis])
    loss, ahead = losses
    balance = BalanceLosses(*all_reduce_no_grad(torch.stack(sums.balance), world))
    counts_3ME = all_reduce_no_grad(torch.stack((sums.counts_ME, sums.kept_ME, sums.plain_ME)), world)
    return StepSums(loss, ahead, balance, *counts_3ME)


@torch.no_grad()
def move_expert_biases(model: Decoder, kept_ME: Tensor) -> None:
    """The loss-free bias moves against the load of the whole step, the same on every rank."""
    for row, router in model.routers().items():
        if router.expert_bias is not None:
            router.expert_bias.copy_(update_expert_bias(router.expert_bias, kept_ME[row], router.bias_update_rate))


def count_step_labels(mine: int, groups: Groups) -> int:
    """The labels of the whole step: the one divisor of the loss, counted once, before the first forward."""
    (labels,) = count_over_step((mine,), groups)
    return labels


def count_over_step(mine: Sequence[int], groups: Groups) -> tuple[int, ...]:
    """Several counts of the whole step at once."""
    return tuple(all_reduce_no_grad(all_reduce_no_grad(torch.tensor(mine), groups["dp"]), groups["cp"]).tolist())
