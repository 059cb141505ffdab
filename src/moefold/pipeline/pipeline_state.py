"""The state of one step on one rank: inputs, saved forwards and gradients by stage and microbatch, and sums.

The divisors of the step (labels, tokens) are in the batches: they were counted over all ranks before the first
forward. Gradients are therefore this rank's terms of a sum, and are not divided again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.p2p import Expected, P2PChannels
from moefold.model.decoder import DecoderOutput, HiddenState
from moefold.model.mtp import loss_scales
from moefold.moe.load_balancing import BalanceLosses
from moefold.nn.batch import Batch
from moefold.nn.phase_autograd import NO_HOOKS, PartHooks
from moefold.parallel.parallelize import LocalModel
from moefold.precision.dtypes import TORCH_FORMATS
from moefold.schedule.actions import Action, Kind, Order
from moefold.topology.folded_layout import shard_sizes

# (stage, microbatch)
Key = tuple[int, int]
# Called with the number of a microbatch and the output of a stage, after its forward.
OnOutput = Callable[[int, DecoderOutput], None]


class StepSums(NamedTuple):
    """Sums over the forwards of a step: losses divided by the step's labels, balance losses by its tokens."""

    loss: Tensor
    # Of the MTP modules, scaled by their weight.
    mtp_loss: Tensor
    # A row per MoE layer of the model, a column per balance loss.
    balance_M5: Tensor
    # Assignments before dropping, after it, and of the plain top-k, as in ``RoutingReport``.
    counts_ME: Tensor
    kept_ME: Tensor
    plain_ME: Tensor
    # Rows that did not fit into buffers of a fixed size; None without such buffers. Of a step that was run again, those
    # of its first run.
    overflow: Tensor | None = None

    @property
    def balance(self) -> BalanceLosses:
        """Of all layers together."""
        return BalanceLosses(*self.balance_M5.sum(0).unbind())

    @property
    def dropped(self) -> Tensor:
        return self.counts_ME.sum() - self.kept_ME.sum()


@dataclass
class PipelineState:
    local_model: LocalModel
    order: Order
    batches: Sequence[Batch]
    channels: P2PChannels | None
    sums: StepSums
    # A stage's input hidden state (its gradient goes to ``.grad``), and what its backward needs of its forward.
    inputs: dict[Key, HiddenState] = field(default_factory=dict)
    forwards: dict[Key, Any] = field(default_factory=dict)
    # Hidden states and gradients to be sent, and gradients of a stage's output that have been received.
    pending_sends: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    gradients: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    on_output: OnOutput | None = None
    # The first forward of each stage, and the last backward of those in which nothing is deferred.
    first_forwards: frozenset[Key] = frozenset()
    last_backwards: frozenset[Key] = frozenset()

    def part_hooks(self, key: Key) -> PartHooks:
        """Of the forward of this microbatch, and of its backward."""
        if key not in self.first_forwards and key not in self.last_backwards:
            return NO_HOOKS
        hooks = self.local_model.sharding.part_hooks(key[0])
        enter = hooks.enter if key in self.first_forwards else None
        return PartHooks(enter, hooks.left if key in self.last_backwards else None)

    def peer(self, stage: int) -> int:
        return self.order.rank_of_stage[stage]


def init_state(
    local_model: LocalModel, order: Order, batches: Sequence[Batch], actions: Sequence[Action]
) -> PipelineState:
    group = local_model.groups["pp"]
    channels = None
    if not group.alone:
        dtype, device = TORCH_FORMATS[local_model.run.precision.compute], batches[0].tokens_S.device
        channels = P2PChannels(group, dtype, device, deque(_expected(local_model, order, batches, actions)))
    return PipelineState(local_model, order, batches, channels, zero_sums(local_model))


def _expected(
    local_model: LocalModel, order: Order, batches: Sequence[Batch], actions: Sequence[Action]
) -> list[Expected]:
    """Every message this rank will receive. A stage's input and its gradient have the hidden state's shape."""
    messages = []
    for action in actions:
        if action.kind is Kind.RECV_F:
            boundary, peer = action.stage, order.rank_of_stage[action.stage - 1]
        elif action.kind is Kind.RECV_B:
            boundary, peer = action.stage + 1, order.rank_of_stage[action.stage + 1]
        else:
            continue
        hiddens = 1 + sum(len(stage.mtp) for stage in local_model.stages[:boundary])
        rows = shard_sizes(batches[action.microbatch].num_tokens, local_model.groups["tp"].size)[
            local_model.groups["tp"].index
        ]
        messages.append(Expected(peer, ((rows, local_model.run.model.dim),) * hiddens))
    return messages


def zero_sums(local_model: LocalModel) -> StepSums:
    wide = torch.promote_types(TORCH_FORMATS[local_model.run.precision.compute], torch.float32)
    zero = torch.zeros((), dtype=wide, device=local_model.device)
    experts = 0 if local_model.run.model.moe is None else local_model.run.model.moe.num_experts
    counts_ME = torch.zeros(len(local_model.model.moe_blocks), experts, dtype=torch.int64, device=local_model.device)
    overflow = counts_ME.new_zeros(()) if local_model.has_row_bounds else None
    balance_M5 = zero.new_zeros(len(counts_ME), len(BalanceLosses._fields))
    return StepSums(zero, zero, balance_M5, counts_ME, counts_ME, counts_ME, overflow)


def label_losses_of(
    local_model: LocalModel, output: DecoderOutput, batch: Batch
) -> tuple[Tensor | None, Tensor | None]:
    """This stage's terms of the loss and of the MTP loss; None where it has none."""
    # A step whose loss mask leaves no label sums to zero.
    loss = None if output.loss_sum is None else output.loss_sum / max(batch.step_labels, 1)
    if not output.ahead_loss_sums:
        return loss, None
    scales = loss_scales(local_model.run.model, batch)
    scaled = [part * scale for part, scale in zip(output.ahead_loss_sums, scales, strict=True)]
    return loss, sum(scaled[1:], scaled[0])


def objective_of(local_model: LocalModel, output: DecoderOutput, batch: Batch) -> Tensor | None:
    """This stage's local loss, scaled; None if it has none. Its other gradients come from the next stage."""
    kinds = zip(*(report.losses for _, report in output.reports), strict=True)
    balance = [torch.stack(parts).sum() for parts in kinds]
    possible = [*label_losses_of(local_model, output, batch), *balance]
    terms = [term for term in possible if term is not None and term.requires_grad]
    if not terms:
        return None
    objective = sum(terms[1:], terms[0])
    return objective if batch.loss_scale == 1.0 else objective * batch.loss_scale


@torch.no_grad()
def add_sums(sums: StepSums, local_model: LocalModel, output: DecoderOutput, batch: Batch) -> StepSums:
    loss, mtp_loss = label_losses_of(local_model, output, batch)
    reports, overflow = dict(output.reports), sums.overflow
    assert len(reports) == len(output.reports), "an MoE layer reports once per microbatch"
    if overflow is not None:
        rows_over = [report.overflow for report in reports.values() if report.overflow is not None]
        overflow = sum(rows_over, overflow)
    return StepSums(
        sums.loss if loss is None else sums.loss + loss,
        sums.mtp_loss if mtp_loss is None else sums.mtp_loss + mtp_loss,
        _add_layers(sums.balance_M5, {row: report.losses for row, report in reports.items()}),
        _add_layers(sums.counts_ME, {row: (report.counts_E,) for row, report in reports.items()}),
        _add_layers(sums.kept_ME, {row: (report.kept_E,) for row, report in reports.items()}),
        _add_layers(sums.plain_ME, {row: (report.plain_E,) for row, report in reports.items()}),
        overflow,
    )


def _add_layers(total_M: Tensor, parts: Mapping[int, tuple[Tensor, ...]]) -> Tensor:
    """Rows of all layers in one addition: an addition per layer would be launches per layer."""
    if not parts:
        return total_M
    some = next(iter(parts.values()))
    none = (torch.zeros_like(some[0]),) * len(some)
    rows = [parts.get(row, none) for row in range(len(total_M))]
    return total_M + torch.stack([part for row in rows for part in row]).view_as(total_M)


def as_leaf(hidden: Sequence[Tensor]) -> HiddenState:
    """The hidden state as leaves of the next stage's graph; backward sets their ``.grad``."""
    x_tD, *ahead_tD = (tensor.detach().requires_grad_(torch.is_grad_enabled()) for tensor in hidden)
    return HiddenState(x_tD, tuple(ahead_tD))


def hidden_tensors(hidden: HiddenState) -> tuple[Tensor, ...]:
    return (hidden.x_tD, *hidden.ahead_tD)
