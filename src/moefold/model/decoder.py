"""The model, or the part of it that one pipeline rank holds: tokens in, the summed loss and routing reports out.

A stage is a run of consecutive parts (embedding, layers, MTP modules, loss); what crosses from one to the next is a
``HiddenState``. A rank may hold several stages, and one that holds them all is the whole model. Parameters keep the
names they have in the whole model wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.blueprint.stages import StageSpec
from moefold.model.block import Block, BlockOutput
from moefold.model.mtp import MTPModule
from moefold.moe.layer import MoELayer
from moefold.moe.load_balancing import RoutingReport
from moefold.moe.router import Router
from moefold.nn.batch import Batch
from moefold.nn.layers import Linear, RMSNorm
from moefold.nn.phase import Phase, Stream, nest, run_in_order
from moefold.nn.phase_autograd import NO_HOOKS, PartHooks, boundary
from moefold.nn.vocab import Embedding, LanguageLoss


class HiddenState(NamedTuple):
    """What crosses from one stage to the next: the hidden state, and one more of each MTP module."""

    x_tD: Tensor
    ahead_tD: tuple[Tensor, ...] = ()


class DecoderOutput(NamedTuple):
    """A stage's output: the hidden state, or after the last stage the losses summed over the microbatch's labels.

    Reports come with the number of their MoE layer among those of the whole model.
    """

    hidden: HiddenState | None = None
    reports: tuple[tuple[int, RoutingReport], ...] = ()
    loss_sum: Tensor | None = None
    # One for each MTP module.
    ahead_loss_sums: tuple[Tensor, ...] = ()
    # Of the labels, without a gradient, where the batch has an objective of its own.
    logprob_S: Tensor | None = None
    entropy_S: Tensor | None = None


class Decoder(nn.Module):
    """The loss is part of the forward: logits are never whole, and parameters are needed only inside this call."""

    def __init__(
        self,
        whole: StageSpec,
        embedding: Embedding | None,
        layers: dict[int, Block],
        mtp: dict[int, MTPModule],
        final_norm: RMSNorm | None,
        head: Linear | None,
        mtp_norms: dict[int, RMSNorm],
        loss: LanguageLoss,
        moe_blocks: tuple[str, ...],
    ) -> None:
        """``whole`` is the stage that is run if none is named; ``moe_blocks`` the names of the whole model's."""
        super().__init__()
        self.whole = whole
        self.embedding = embedding
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})
        self.mtp = nn.ModuleDict({str(number): module for number, module in mtp.items()})
        self.final_norm = final_norm
        self.head = head
        self.mtp_norms = nn.ModuleDict({str(number): norm for number, norm in mtp_norms.items()})
        self.loss = loss
        self.moe_blocks = moe_blocks

    def forward(
        self,
        batch: Batch,
        earlier_ME: Tensor | None = None,
        stage: StageSpec | None = None,
        hidden: HiddenState | None = None,
        hooks: PartHooks = NO_HOOKS,
    ) -> DecoderOutput:
        """``earlier_ME``: tokens per expert in the step's earlier microbatches, one row per MoE layer."""
        phases = tuple(self._walk(batch, earlier_ME, stage or self.whole, take_apart=False))
        carry = DecoderOutput(hidden)
        for phase in phases:
            if phase.part is not None and hooks.enter is not None:
                hooks.enter(phase.part)
            if phase.part is not None and hooks.left is not None and carry.hidden is not None:
                x_tD, *ahead_tD = boundary(partial(hooks.left, phase.part), (carry.hidden.x_tD, *carry.hidden.ahead_tD))
                carry = carry._replace(hidden=HiddenState(x_tD, tuple(ahead_tD)))
            carry = phase.run(carry)
        return carry

    def phases(self, batch: Batch, earlier_ME: Tensor | None, stage: StageSpec) -> tuple[Phase, ...]:
        """The same forward in pieces fine enough to run between another microbatch's."""
        return tuple(self._walk(batch, earlier_ME, stage, take_apart=True))

    def logits(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """[T, V], or of these ``rows`` only, written out in full: for one process that compares or generates, not for
        training."""
        (found,) = self.logits_in_parts(batch, rows, None)
        return found

    def logits_in_parts(self, batch: Batch, rows: Tensor | None, size: int | None) -> Iterator[Tensor]:
        """The same by so many rows at a time."""
        assert self.final_norm is not None
        layers = replace(self.whole, mtp=(), loss=False)
        phases = tuple(self._walk(batch, None, layers, take_apart=False))
        hidden = run_in_order(phases, DecoderOutput()).hidden
        x_TD = self.final_norm(hidden.x_tD if rows is None else hidden.x_tD[rows])
        head_VD = self.head_weight.to(x_TD.dtype)
        yield from (part @ head_VD.T for part in x_TD.split(max(len(x_TD), 1) if size is None else size))

    def routers(self) -> dict[int, Router]:
        """Of every MoE layer here, by its number among those of the whole model."""
        found = {}
        for number, name in enumerate(self.moe_blocks):
            block = self._block(name)
            if block is not None and isinstance(block.feed_forward, MoELayer):
                found[number] = block.feed_forward.router
        return found

    @property
    def head_weight(self) -> Tensor:
        if self.head is not None:
            return self.head.weight
        assert self.embedding is not None
        return self.embedding.weight

    def _block(self, name: str) -> Block | None:
        folder, number, *_ = name.split(".")
        held = self.layers if folder == "layers" else self.mtp
        if number not in held:
            return None
        found = held[number]
        block = found.block if isinstance(found, MTPModule) else found
        assert isinstance(block, Block)
        return block

    def _walk(self, batch: Batch, earlier_ME: Tensor | None, stage: StageSpec, *, take_apart: bool) -> Iterator[Phase]:
        """A stage's parts in order, each as one phase or taken apart into its own.

        A part that is one phase is a call of its module: sharded data parallelism gathers parameters around those.
        """
        number = count()
        if stage.embedding:
            yield Phase("embedding", Stream.COMPUTE, partial(self._embed, batch), part=next(number))
        for layer in stage.layers:
            row, earlier_E = self._row(f"layers.{layer}", earlier_ME)
            block = self.layers[str(layer)]
            assert isinstance(block, Block)
            whole = Phase(f"layer {layer}", Stream.COMPUTE, partial(_call, block, batch, earlier_E))
            phases = block.phases(batch, earlier_E) if take_apart else (whole,)
            yield from _as_part(next(number), nest(phases, _hidden_state_of, partial(_after_layer, row)))
        for depth in stage.mtp:
            row, earlier_E = self._row(f"mtp.{depth}.block", earlier_ME)
            module, tokens = self.mtp[str(depth)], partial(self._tokens_ahead, depth, batch)
            assert isinstance(module, MTPModule)
            whole = Phase(f"ahead {depth}", Stream.COMPUTE, partial(_call_ahead, module, tokens, batch, earlier_E))
            phases = module.phases(tokens, batch, earlier_E) if take_apart else (whole,)
            nested = nest(phases, partial(self._before_ahead, depth), partial(_after_ahead, row))
            yield from _as_part(next(number), nested)
        if stage.loss:
            yield Phase("loss", Stream.COMPUTE, partial(self._losses, batch), part=next(number))

    def _row(self, name: str, earlier_ME: Tensor | None) -> tuple[int | None, Tensor | None]:
        if name not in self.moe_blocks:
            return None, None
        row = self.moe_blocks.index(name)
        return row, None if earlier_ME is None else earlier_ME[row]

    def _embed(self, batch: Batch, carry: DecoderOutput) -> DecoderOutput:
        assert self.embedding is not None
        x_tD = self.embedding(batch.tokens_S)
        if torch.is_grad_enabled() and not x_tD.requires_grad:
            # Of a frozen embedding: stages, recomputed phases and FSDP's hooks have a backward all the same.
            x_tD.requires_grad_()
        return carry._replace(hidden=HiddenState(x_tD))

    def _before_ahead(self, depth: int, carry: DecoderOutput) -> Tensor:
        """The hidden state as the head reads it, after its norm: speculative decoding feeds MTP modules so."""
        assert carry.hidden is not None
        x_tD, ahead_tD = carry.hidden
        norm = self.final_norm if depth == 0 else self.mtp_norms[str(depth - 1)]
        assert norm is not None
        before_tD: Tensor = norm(x_tD if depth == 0 else ahead_tD[depth - 1])
        return before_tD

    def _tokens_ahead(self, depth: int, batch: Batch) -> Tensor:
        assert self.embedding is not None
        token_tD: Tensor = self.embedding(batch.ahead[depth].tokens_S)
        return token_tD

    def _losses(self, batch: Batch, carry: DecoderOutput) -> DecoderOutput:
        assert self.final_norm is not None and carry.hidden is not None
        x_tD, ahead_tD = carry.hidden
        normed_tD, objective = self.final_norm(x_tD), batch.objective
        logprob_S = entropy_S = None
        if objective is None:
            loss_sum = self.loss(normed_tD, self.head_weight, batch.labels_S, batch)
        else:
            logprob_S = self.loss.logprobs(normed_tD, self.head_weight, batch, objective.temperature)
            loss_sum, logprob_S = objective.loss(logprob_S, objective.inputs), logprob_S.detach()
            if objective.entropies:
                entropy_S = self.loss.entropies(normed_tD, self.head_weight, batch, objective.temperature)
        ahead_sums = tuple(
            self.loss(self.mtp_norms[str(depth)](y_tD), self.head_weight, batch.ahead[depth].labels_S, batch)
            for depth, y_tD in enumerate(ahead_tD)
        )
        return DecoderOutput(None, carry.reports, loss_sum, ahead_sums, logprob_S, entropy_S)


def _as_part(number: int, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    return replace(phases[0], part=number), *phases[1:]


def _hidden_state_of(carry: DecoderOutput) -> Tensor:
    assert carry.hidden is not None
    return carry.hidden.x_tD


def _call(block: Block, batch: Batch, earlier_E: Tensor | None, x_tD: Tensor) -> BlockOutput:
    output: BlockOutput = block(x_tD, batch, earlier_E)
    return output


def _call_ahead(
    module: MTPModule, tokens: Callable[[], Tensor], batch: Batch, earlier_E: Tensor | None, x_tD: Tensor
) -> BlockOutput:
    output: BlockOutput = module(x_tD, tokens(), batch, earlier_E)
    return output


def _after_layer(row: int | None, carry: DecoderOutput, output: BlockOutput) -> DecoderOutput:
    assert carry.hidden is not None
    return carry._replace(
        hidden=HiddenState(output.x_tD, carry.hidden.ahead_tD), reports=_with(carry.reports, row, output.report)
    )


def _after_ahead(row: int | None, carry: DecoderOutput, output: BlockOutput) -> DecoderOutput:
    assert carry.hidden is not None
    x_tD, ahead_tD = carry.hidden
    return carry._replace(
        hidden=HiddenState(x_tD, (*ahead_tD, output.x_tD)), reports=_with(carry.reports, row, output.report)
    )


def _with(
    reports: tuple[tuple[int, RoutingReport], ...], row: int | None, report: RoutingReport | None
) -> tuple[tuple[int, RoutingReport], ...]:
    if row is None or report is None:
        return reports
    return (*reports, (row, report))
