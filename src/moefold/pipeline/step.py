"""One optimizer step on one rank's share: gradients of every microbatch, one norm, one bounded update.

M mixtures of the model, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from moefold.comm.collectives import sum_plain
from moefold.comm.process_groups import Groups
from moefold.model.decoder import Decoder
from moefold.moe.load_balancing import BalanceLosses, update_expert_bias
from moefold.nn.batch import Batch
from moefold.optim.grad_norm import clip_gradients, gradient_norm
from moefold.parallel.fsdp import gather_once, put_to_rest, reduce_once
from moefold.parallel.parallelize import Share
from moefold.parallel.param_shards import Held, finish_gradients
from moefold.pipeline.pipeline_state import StepSums
from moefold.pipeline.runtime import Told, carry_forward, carry_out, untold


class StepResult(NamedTuple):
    """``skipped`` says why the update was not taken; then nothing has changed."""

    sums: StepSums
    norm: Tensor
    skipped: str | None = None


# Sees the gradients before they are clipped.
Look = Callable[[dict[str, Tensor]], None]
# Asked with the step's sums and norm, which all ranks hold alike: a reason not to take the step, or None.
Objection = Callable[[StepSums, Tensor], str | None]


def look_away(gradients: dict[str, Tensor]) -> None:
    """Does not want to see them."""


def never(sums: StepSums, norm: Tensor) -> None:
    """Has no objection."""


def run_step(
    share: Share,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    look: Look = look_away,
    objection: Objection = never,
    told: Told = untold,
) -> StepResult:
    """Forward and backward over ``batches``, then one clipped update and the loss-free bias's move."""
    optimizer.zero_grad()
    if share.gathers_once:
        gather_once(share.model)
    sums = over_ranks(carry_out(share, batches, told), share.groups)
    if share.gathers_once:
        reduce_once(share.model, share.groups)
    gradients = finish_gradients(share.model, share.held, share.groups["pp"])
    look(gradients)
    norm = gradient_norm(spoken_for(gradients, share.held), share.groups["world"])
    if (reason := objection(sums, norm)) is not None:
        return StepResult(sums, norm, reason)
    clip_gradients(gradients.values(), norm, share.run.optim.clip_norm)
    optimizer.step()
    move_expert_biases(share.model, sums.kept_ME)
    return StepResult(sums, norm)


def evaluate(share: Share, batches: Sequence[Batch]) -> Tensor:
    """The loss per label of these batches, on every rank; nothing is kept and nothing changes."""
    training = share.model.training
    share.model.eval()
    try:
        if share.gathers_once:
            gather_once(share.model)
        sums = over_ranks(carry_forward(share, batches), share.groups)
        put_to_rest(share.model)
    finally:
        share.model.train(training)
    return sums.loss


def spoken_for(gradients: dict[str, Tensor], held: dict[str, Held]) -> list[Tensor]:
    """The parts that enter the norm here; whatever several ranks repeat enters on one of them."""
    return [gradient for name, gradient in gradients.items() if held[name].speaks]


def over_ranks(sums: StepSums, groups: Groups) -> StepSums:
    """Tensor-parallel ranks all hold their tokens' whole loss, but each only its own tokens' balance and counts.

    Each of them adds up its own: a loss that is wrong on one of them alone must not be overlooked.
    """
    world = groups["world"]
    losses = torch.stack((sums.loss, sums.ahead))
    for axis in ("dp", "cp", "pp"):
        losses = sum_plain(losses, groups[axis])
    loss, ahead = losses
    balance = BalanceLosses(*sum_plain(torch.stack(sums.balance), world))
    counts_3ME = sum_plain(torch.stack((sums.counts_ME, sums.kept_ME, sums.plain_ME)), world)
    return StepSums(loss, ahead, balance, *counts_3ME)


@torch.no_grad()
def move_expert_biases(model: Decoder, kept_ME: Tensor) -> None:
    """The loss-free bias moves against the load of the whole step, the same on every rank."""
    for row, router in model.routers().items():
        if router.expert_bias is not None:
            router.expert_bias.copy_(update_expert_bias(router.expert_bias, kept_ME[row], router.bias_rate))


def count_step_labels(mine: int, groups: Groups) -> int:
    """The labels of the whole step: the one divisor of the loss, counted once, before the first forward."""
    (labels,) = count_over_step((mine,), groups)
    return labels


def count_over_step(mine: Sequence[int], groups: Groups) -> tuple[int, ...]:
    """Several counts of the whole step at once."""
    return tuple(sum_plain(sum_plain(torch.tensor(mine), groups["dp"]), groups["cp"]).tolist())
