"""Delayed scaling: the amaxes of earlier steps decide the scales of a step.

A scale of the tensor itself needs its amax before the first value can be narrowed. With one that is known in advance a
tensor is read once, and values that exceed all of the history saturate.

Each weight has a history of three operands: its input x, itself and the gradient dy of its output. In a step the amaxes
of all microbatches are noted (``record``: a maximum, so recomputing a forward or deferring a weight gradient changes
nothing); a step's largest ones over all ranks are put in front of the history when its update is made (``push``). So
no layout, and no number of microbatches, changes a scale. Evaluation reads the history and leaves none.

Matrices of a stack (gate and up, experts) have amaxes of their own, and rows of all experts one. The history has all
experts on every rank, which makes it the same on all ranks of a stage.

**Where there is no history** (the first step, or a checkpoint without one) scales are those of the tensors themselves.
Transformer Engine starts with scales of 1 instead, in which gradients of a mean over many tokens are zero in E5M2. An
amax that is zero or not finite counts as none; in a step that is skipped nothing is put in front.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor, nn

from moefold.config.casts import Cast
from moefold.config.precision import AmaxComputeAlgo
from moefold.config.precision_recipes import Operand
from moefold.precision.amax import Amaxes

OPERANDS: tuple[Operand, ...] = get_args(Operand)


class AmaxHistory(nn.Module):
    """Of one weight; buffers ``x``, ``w`` and ``dy`` have a row per step, the newest first. Zeros are no amaxes."""

    x: Tensor
    w: Tensor
    dy: Tensor

    def __init__(
        self, length: int, stack: tuple[int, ...], algo: AmaxComputeAlgo = "max", experts: slice | None = None
    ) -> None:
        """``stack``: leading dims of the weight, over all ranks; ``experts``: which of the first dim are here."""
        super().__init__()
        for operand in OPERANDS:
            self.register_buffer(operand, torch.zeros(length, *self._stack(operand, stack)))
        self.algo, self.experts = algo, experts
        # Whether there has been a step.
        self.known = False
        self._noted: dict[Operand, Tensor] = {}
        self._amaxes: dict[Operand, Tensor] = {}

    def _stack(self, operand: Operand, stack: tuple[int, ...]) -> tuple[int, ...]:
        return stack if operand == "w" else ()

    def start_step(self) -> None:
        self._noted.clear()

    def record(self, operand: Operand, own: Tensor) -> None:
        """``own``: of the matrices of a weight, or of anything that x and dy are cut into."""
        own = own if operand == "w" else own.amax()
        noted = self._noted.get(operand)
        self._noted[operand] = own if noted is None else torch.maximum(noted, own)

    def amax(self, operand: Operand) -> Tensor:
        """By which a step narrows: of the weight's matrices here, or one number."""
        if operand not in self._amaxes:
            history: Tensor = getattr(self, operand)
            amax = history.amax(0) if self.algo == "max" else history[0]
            self._amaxes[operand] = amax if operand != "w" or self.experts is None else amax[self.experts]
        return self._amaxes[operand]

    def noted(self) -> Tensor:
        """Of this step so far and all operands, one after the other; matrices of other ranks are zeros."""
        rows = []
        for operand in OPERANDS:
            row = torch.zeros_like(getattr(self, operand)[0], dtype=torch.float32)
            if operand in self._noted:
                noted = self._noted[operand]
                part = row if operand != "w" or self.experts is None else row[self.experts]
                part.copy_(torch.where(torch.isfinite(noted), noted, 0.0))
            rows.append(row.flatten())
        return torch.cat(rows)

    @torch.no_grad()
    def push(self, amaxes: Tensor) -> None:
        """Put what ``noted`` was on all ranks in front of the history, and forget its oldest row."""
        histories: list[Tensor] = [getattr(self, operand) for operand in OPERANDS]
        rows = amaxes.split([history[0].numel() for history in histories])
        for history, row in zip(histories, rows, strict=True):
            history.copy_(torch.cat((row.view_as(history[:1]).to(history.dtype), history[:-1])))
        self.known = True
        self._amaxes.clear()
        self._noted.clear()

    @torch.no_grad()
    def load(self, rows: dict[Operand, Tensor]) -> None:
        """What a checkpoint has; an operand of which it has none starts anew."""
        for operand in OPERANDS:
            history: Tensor = getattr(self, operand)
            history.zero_()
            if operand in rows:
                history.copy_(rows[operand])
        self.known = len(rows) == len(OPERANDS) and bool(self.w.any())
        self._amaxes.clear()
        self._noted.clear()


class DelayedAmaxes:
    """``current``: where amaxes come from as long as there is no history."""

    def __init__(self, history: AmaxHistory, current: Amaxes) -> None:
        self.history, self.current = history, current

    def of(self, operand: Operand, cast: Cast, own: Callable[[], Tensor]) -> Tensor | None:
        if not cast.delayed:
            return self.current.of(operand, cast, own)
        amax = own()
        self.history.record(operand, amax)
        if not self.history.known:
            return self.current.of(operand, cast, lambda: amax)
        kept = self.history.amax(operand)
        return torch.where(kept > 0, kept, amax)
