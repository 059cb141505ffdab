"""One optimizer step on one rank's share: gradients of every microbatch, one norm, one bounded update.

L layers with experts, E experts.

The divisors of the step (labels, tokens) are in the batches: they were counted over all ranks before the first
forward. What backward yields is therefore already this rank's part of a sum, and nothing is divided again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from moefold.comm.gather import sum_plain
from moefold.comm.mesh import Groups
from moefold.model.batch import Batch
from moefold.model.decoder import Decoder, DecoderOutput
from moefold.model.moe.balance import BalanceLosses, update_expert_bias
from moefold.optim.clip import clip_gradients, gradient_norm
from moefold.parallel.apply import Share
from moefold.parallel.gradients import finish_gradients
from moefold.parallel.placements import Held


class StepSums(NamedTuple):
    """What the forwards of a step added up to: the loss per label of the step, balance losses per token of it."""

    loss: Tensor
    balance: BalanceLosses
    counts_LE: Tensor
    dropped: Tensor


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
) -> StepResult:
    """Forward and backward over ``batches``, then one clipped update and the loss-free bias's move."""
    optimizer.zero_grad()
    sums = over_ranks(accumulate(share.model, batches), share.groups)
    gradients = finish_gradients(share.model, share.held)
    look(gradients)
    norm = gradient_norm(spoken_for(gradients, share.held), share.groups["world"])
    if (reason := objection(sums, norm)) is not None:
        return StepResult(sums, norm, reason)
    clip_gradients(gradients.values(), norm, share.run.optim.clip_norm)
    optimizer.step()
    move_expert_biases(share.model, sums.counts_LE)
    return StepResult(sums, norm)


def spoken_for(gradients: dict[str, Tensor], held: dict[str, Held]) -> list[Tensor]:
    """The parts that enter the norm here; whatever several ranks repeat enters on one of them."""
    return [gradient for name, gradient in gradients.items() if held[name].speaks]


def accumulate(model: Decoder, batches: Sequence[Batch]) -> StepSums:
    """This rank's part of the sums; gradients add up in the parameters."""
    total: StepSums | None = None
    for batch in batches:
        output = model(batch, None if total is None else total.counts_LE)
        part = _sums(output, batch)
        (part.loss + sum(part.balance)).backward()
        part = StepSums(part.loss.detach(), BalanceLosses(*(x.detach() for x in part.balance)), *part[2:])
        total = part if total is None else _add(total, part)
    assert total is not None, "a step needs at least one batch"
    return total


def _sums(output: DecoderOutput, batch: Batch) -> StepSums:
    loss = output.loss_sum / batch.step_labels
    if not output.reports:
        none = loss.new_zeros(())
        return StepSums(loss, BalanceLosses(*[none] * 5), loss.new_zeros(0, 0, dtype=torch.int64), none.long())
    balance = BalanceLosses(
        *(torch.stack(parts).sum() for parts in zip(*(r.losses for r in output.reports), strict=True))
    )
    counts_LE = torch.stack([report.counts_E for report in output.reports])
    return StepSums(loss, balance, counts_LE, torch.stack([report.dropped for report in output.reports]).sum())


def _add(a: StepSums, b: StepSums) -> StepSums:
    balance = BalanceLosses(*(x + y for x, y in zip(a.balance, b.balance, strict=True)))
    return StepSums(a.loss + b.loss, balance, a.counts_LE + b.counts_LE, a.dropped + b.dropped)


def over_ranks(sums: StepSums, groups: Groups) -> StepSums:
    """Tensor-parallel ranks all hold their batch's whole loss, but each only its own tokens' balance and counts."""
    stage = groups["stage"]
    balance = BalanceLosses(*sum_plain(torch.stack(sums.balance), stage))
    counts_LE = sum_plain(sums.counts_LE, stage)
    return StepSums(sum_plain(sums.loss, groups["dp"]), balance, counts_LE, sum_plain(sums.dropped, stage))


@torch.no_grad()
def move_expert_biases(model: Decoder, counts_LE: Tensor) -> None:
    """The loss-free bias moves against the load of the whole step, the same on every rank."""
    for router, counts_E in zip(model.routers(), counts_LE, strict=True):
        if router.expert_bias is not None:
            router.expert_bias.copy_(update_expert_bias(router.expert_bias, counts_E, router.bias_rate))


def count_step_labels(mine: int, groups: Groups) -> int:
    """The labels of the whole step: the one divisor of the loss, counted once, before the first forward."""
    return int(sum_plain(torch.tensor(mine), groups["dp"]))
