"""One step under way on one rank: which microbatches are where, and what they have added up to.

t tokens of this rank, D width, M mixtures of the model, E experts.

The divisors of the step (labels, tokens) are in the batches: they were counted over all ranks before the first
forward. What backward yields is therefore already this rank's part of a sum, and nothing is divided again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.p2p import Expected, P2PChannels
from moefold.model.decoder import DecoderOutput, HiddenState
from moefold.model.mtp import loss_scales
from moefold.moe.load_balancing import BalanceLosses
from moefold.nn.batch import Batch
from moefold.parallel.parallelize import LocalModel
from moefold.precision.dtypes import TORCH_FORMATS
from moefold.schedule.actions import Action, Kind, Order
from moefold.topology.shares import share_sizes

# (stage, microbatch)
Key = tuple[int, int]


class StepSums(NamedTuple):
    """What the forwards of a step added up to: losses per label of the step, balance losses per token of it."""

    loss: Tensor
    # Of the modules that look further ahead, their weight included.
    ahead: Tensor
    balance: BalanceLosses
    # Assignments before dropping, after it, and of the plain top-k, as in ``RoutingReport``.
    counts_ME: Tensor
    kept_ME: Tensor
    plain_ME: Tensor

    @property
    def dropped(self) -> Tensor:
        return self.counts_ME.sum() - self.kept_ME.sum()


@dataclass
class PipelineState:
    local_model: LocalModel
    order: Order
    batches: Sequence[Batch]
    pipes: P2PChannels | None
    sums: StepSums
    # What a stage was given (its gradient is left on these tensors), and what backward needs of its forward.
    inputs: dict[Key, HiddenState] = field(default_factory=dict)
    forwards: dict[Key, Any] = field(default_factory=dict)
    # Streams and gradients that are to be sent, and gradients that have arrived.
    leaving: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    gradients: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)

    def peer(self, stage: int) -> int:
        return self.order.rank_of_stage[stage]


def init_state(
    local_model: LocalModel, order: Order, batches: Sequence[Batch], actions: Sequence[Action]
) -> PipelineState:
    group = local_model.groups["pp"]
    pipes = None
    if not group.alone:
        dtype, device = TORCH_FORMATS[local_model.run.precision.compute], batches[0].tokens_T.device
        pipes = P2PChannels(group, dtype, device, deque(_expected(local_model, order, batches, actions)))
    return PipelineState(local_model, order, batches, pipes, no_sums(local_model))


def _expected(
    local_model: LocalModel, order: Order, batches: Sequence[Batch], actions: Sequence[Action]
) -> list[Expected]:
    """Every message this rank will receive. A stage's input and its gradient have the shape of the stream there."""
    messages = []
    for action in actions:
        if action.kind is Kind.RECV_F:
            boundary, peer = action.stage, order.rank_of_stage[action.stage - 1]
        elif action.kind is Kind.RECV_B:
            boundary, peer = action.stage + 1, order.rank_of_stage[action.stage + 1]
        else:
            continue
        hiddens = 1 + sum(len(stage.mtp) for stage in local_model.stages[:boundary])
        rows = share_sizes(batches[action.microbatch].num_tokens, local_model.groups["tp"].size)[
            local_model.groups["tp"].index
        ]
        messages.append(Expected(peer, ((rows, local_model.run.model.dim),) * hiddens))
    return messages


def no_sums(local_model: LocalModel) -> StepSums:
    wide = torch.promote_types(TORCH_FORMATS[local_model.run.precision.compute], torch.float32)
    none = torch.zeros((), dtype=wide, device=local_model.device)
    experts = 0 if local_model.run.model.moe is None else local_model.run.model.moe.num_experts
    counts_ME = torch.zeros(len(local_model.model.mixtures), experts, dtype=torch.int64, device=local_model.device)
    return StepSums(none, none, BalanceLosses(*[none] * 5), counts_ME, counts_ME, counts_ME)


def losses_of(
    local_model: LocalModel, output: DecoderOutput, batch: Batch
) -> tuple[Tensor | None, Tensor | None, BalanceLosses | None]:
    """Each kind of loss that this stage has, ready to be added up."""
    model = local_model.run.model
    loss = None if output.loss_sum is None else output.loss_sum / batch.step_labels
    ahead = None
    if output.ahead_loss_sums:
        scaled = [part * scale for part, scale in zip(output.ahead_loss_sums, loss_scales(model, batch), strict=True)]
        ahead = sum(scaled[1:], scaled[0])
    balance = None
    if output.reports:
        kinds = zip(*(report.losses for _, report in output.reports), strict=True)
        balance = BalanceLosses(*(torch.stack(parts).sum() for parts in kinds))
    return loss, ahead, balance


def objective_of(local_model: LocalModel, output: DecoderOutput, batch: Batch) -> Tensor | None:
    """What this stage's parameters are to make small, beyond what the next stage asks; None if nothing."""
    loss, ahead, balance = losses_of(local_model, output, batch)
    terms = [term for term in (loss, ahead, *(balance or ())) if term is not None and term.requires_grad]
    return sum(terms[1:], terms[0]) if terms else None


@torch.no_grad()
def add_sums(sums: StepSums, local_model: LocalModel, output: DecoderOutput, batch: Batch) -> StepSums:
    loss, ahead, balance = losses_of(local_model, output, batch)
    counts_ME, kept_ME, plain_ME = sums.counts_ME, sums.kept_ME, sums.plain_ME
    if output.reports:
        counts_ME, kept_ME, plain_ME = counts_ME.clone(), kept_ME.clone(), plain_ME.clone()
        for row, report in output.reports:
            counts_ME[row] += report.counts_E
            kept_ME[row] += report.kept_E
            plain_ME[row] += report.plain_E
    return StepSums(
        sums.loss if loss is None else sums.loss + loss,
        sums.ahead if ahead is None else sums.ahead + ahead,
        sums.balance
        if balance is None
        else BalanceLosses(*(a + b for a, b in zip(sums.balance, balance, strict=True))),
        counts_ME,
        kept_ME,
        plain_ME,
    )


def as_leaf(hidden: Sequence[Tensor]) -> HiddenState:
    """A stream as the next stage's own leaves, on which its gradient will be left."""
    x_tD, *ahead_tD = (tensor.detach().requires_grad_(torch.is_grad_enabled()) for tensor in hidden)
    return HiddenState(x_tD, tuple(ahead_tD))


def flat(hidden: HiddenState) -> tuple[Tensor, ...]:
    return (hidden.x_tD, *hidden.ahead_tD)
