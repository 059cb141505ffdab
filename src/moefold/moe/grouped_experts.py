"""Experts as grouped GEMMs: permute rows by expert, GEMM, gated activation, GEMM, unpermute and sum.

An expert's output is linear in its hidden activation, so a token's prob may as well multiply there (``weight_at:
activation``). That is half of what is known as memory-efficient permutation: multiplying the output would need the
[P, L] output again in the backward pass, while the activation is saved for the second GEMM anyway.

What surrounds the GEMMs is injected: a ``Permutation`` and the activation that multiplies by the probs. In torch they
are a few operations each (``TorchPermutation``), which is faster than running the kernels' references; on a GPU they
are one kernel each (``KernelPermutation``), which may narrow rows for the first GEMM as well
(``NarrowingPermutation``). Rows that a dispatcher has put in the order of the experts are taken as they are, unless
they are to be padded: then they are permuted all the same, by the order that they have.

``TransformerEnginePermutation`` (``kernels.permute: transformer_engine``) is the library's. Its ``moe_permute`` takes a
map of rows to experts, [R, e] of 0 and 1, where moefold has expert numbers [R, K]; probs have the same shape. Rows come
out sorted by expert and then in their own order, as with moefold's own permutation. The library refuses an empty
permutation, so that a rank without rows uses torch's.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.config.casts import Cast
from moefold.config.moe import MoEConfig
from moefold.errors import BackendError
from moefold.moe.dispatch.base import ExpertInput
from moefold.moe.experts import ExpertWeights
from moefold.moe.kernels.moe_references import RowMap, map_padded
from moefold.moe.moe_kernels import MoEKernels
from moefold.moe.permute import (
    gather_probs,
    gather_rows,
    group_aligned,
    group_by_expert,
    group_padded,
    unpermute_rows,
)
from moefold.nn.low_rank import add_low_rank_grouped
from moefold.nn.matmul_kernels import GroupedMatmul
from moefold.nn.matmul_policy import MatmulPolicy
from moefold.nn.step_retention import KEEP_ALL, Retention
from moefold.ops.activations import weighted_activation
from moefold.ops.padded_runs import aligned
from moefold.precision.both_directions import WaitingCopies


class Permuted(NamedTuple):
    """Rows sorted by expert, the probs that multiply their activation, and what ``unpermute`` needs.

    ``prob_P`` is None where probs multiply the output; ``unpermute`` does that then. ``rows_per_expert``: with padding,
    on the host, where the permutation has padded; None: those that were received.
    """

    rows_PL: Tensor
    prob_P: Tensor | None
    undo: Any
    rows_per_expert: list[int] | None = None


class Permutation(Protocol):
    def permute(
        self,
        expert_in: ExpertInput,
        num_experts: int,
        prob_at_activation: bool,
        retain: Retention = KEEP_ALL,
        multiple: int = 1,
    ) -> Permuted:
        """``multiple``: each expert's rows are followed by rows of zeros up to a multiple of it."""
        ...

    def unpermute(self, out_PL: Tensor, permuted: Permuted) -> Tensor:
        """[R, L]: each received row's expert outputs, summed."""
        ...


class WeightedActivation(Protocol):
    def __call__(self, gate_up_PG: Tensor, prob_P: Tensor | None) -> Tensor:
        """[P, G] before the activation, and the probs to multiply by or None, to [P, F]."""
        ...


class RowCounts(NamedTuple):
    """Rows of each expert, on the device and on the host; None where only the device knows."""

    rows_per_expert_e: Tensor
    rows_per_expert: list[int] | None


class GroupedExperts:
    def __init__(
        self,
        config: MoEConfig,
        matmul_policy: MatmulPolicy,
        matmul: GroupedMatmul,
        permutation: Permutation,
        activation: WeightedActivation,
        retain: Retention = KEEP_ALL,
    ) -> None:
        self.retain = retain
        # Probs come with the permuted rows unless they multiply the output.
        self.prob_at_activation = config.weight_at != "output"
        self.prob_at_input = config.weight_at == "input"
        # Each weight's own, which may differ in their casts.
        self.matmul_policy = self.down_matmul_policy = matmul_policy
        self.matmul = matmul
        # Of rows per expert (``kernels.row_padding: permute``).
        self.multiple = 1
        self.permutation, self.activation = permutation, activation

    def __call__(self, expert_in: ExpertInput, weights: ExpertWeights) -> Tensor:
        pads = self.multiple > 1 and expert_in.capacity is None
        permutation = NO_PERMUTATION if expert_in.by_expert and not pads else self.permutation
        num_experts = weights.gate_up.shape[0]
        retain = self.retain
        if expert_in.rows_per_expert is None:
            retain = retain.of_rows(expert_in.rows_per_expert_e)
        permuted = permutation.permute(expert_in, num_experts, self.prob_at_activation, retain, self.multiple)
        rows_PL, prob_P = permuted.rows_PL, permuted.prob_P
        if self.prob_at_input and prob_P is not None:
            rows_PL, prob_P = times_prob(rows_PL, prob_P), None
        counts = RowCounts(expert_in.rows_per_expert_e, expert_in.rows_per_expert)
        if (padded := permuted.rows_per_expert) is not None:
            counts = RowCounts(torch.tensor(padded, device=rows_PL.device), padded)
        # Only the counts: what is recomputed must not hold the rows that were received.
        gate_up = partial(self._gate_up, weights, counts)
        gate_up_PG = retain.step("gate_up", gate_up, retain.received("rows", rows_PL))
        if prob_P is None:
            hidden_PF = retain.step("activation", partial(self.activation, prob_P=None), gate_up_PG)
        else:
            hidden_PF = retain.step("activation", self.activation, gate_up_PG, prob_P)
        del gate_up_PG
        out_PL = self.down_matmul_policy.grouped(self.matmul, hidden_PF, weights.down, *counts)
        out_PL = self._adapted(out_PL, hidden_PF, weights.down_lora, weights.lora_scale, counts)
        del hidden_PF
        if weights.down_bias is not None:
            # Times 0 rather than left out: every rank's bias takes part in the backward pass.
            bias_PL = bias_of_rows(weights.down_bias, rows_PL, counts) * weights.bias_scale
            out_PL = out_PL + (bias_PL if prob_P is None else times_prob(bias_PL, prob_P))
        return permutation.unpermute(out_PL, permuted)

    def _gate_up(self, weights: ExpertWeights, counts: RowCounts, rows_PL: Tensor) -> Tensor:
        gate_up_PG = self.matmul_policy.grouped(self.matmul, rows_PL, weights.gate_up, *counts)
        gate_up_PG = self._adapted(gate_up_PG, rows_PL, weights.gate_up_lora, weights.lora_scale, counts)
        if weights.gate_up_bias is None:
            return gate_up_PG
        return gate_up_PG + bias_of_rows(weights.gate_up_bias.flatten(1), rows_PL, counts)

    def _adapted(
        self, y: Tensor, rows: Tensor, adapter: tuple[Tensor | None, Tensor | None], scale: float, counts: RowCounts
    ) -> Tensor:
        return add_low_rank_grouped(y, rows, *adapter, scale, self.matmul_policy, self.matmul, counts)


def times_prob(rows: Tensor, prob_P: Tensor) -> Tensor:
    """Multiply in the wider of the two dtypes, then return to the rows' own.

    The prob's gradient is a sum over a whole row and feeds the router, which works in float32 for a reason.
    """
    return (rows * prob_P[:, None]).to(rows.dtype)


def bias_of_rows(bias_eX: Tensor, rows_PL: Tensor, counts: RowCounts) -> Tensor:
    """Each row's own expert's bias; the number of rows is known from their shape, so nothing is read back.

    Rows past the last expert's have no bias, and whatever gradient they have goes to none.
    """
    if counts.rows_per_expert is None:
        ends_e, row_P = counts.rows_per_expert_e.cumsum(0), torch.arange(rows_PL.shape[0], device=rows_PL.device)
        expert_P = torch.searchsorted(ends_e, row_P, right=True)
        padded_eX = torch.cat([bias_eX, bias_eX.new_zeros(1, bias_eX.shape[1])])
        return padded_eX.index_select(0, expert_P).to(rows_PL.dtype)
    bias_PX = bias_eX.repeat_interleave(counts.rows_per_expert_e, dim=0, output_size=rows_PL.shape[0])
    return bias_PX.to(rows_PL.dtype)


class _UndoPermute(NamedTuple):
    token_P: Tensor
    num_rows: int
    padded: bool
    # Where probs multiply the output.
    prob_P: Tensor | None


class TorchPermutation:
    def permute(
        self,
        expert_in: ExpertInput,
        num_experts: int,
        prob_at_activation: bool,
        retain: Retention = KEEP_ALL,
        multiple: int = 1,
    ) -> Permuted:
        padded, rows = expert_in.capacity is not None or multiple > 1, None
        if expert_in.capacity is None and multiple > 1:
            groups = group_aligned(expert_in.assignments, expert_in.host_rows, multiple)
            rows = aligned(expert_in.host_rows, multiple)
        elif expert_in.capacity is None:
            groups = group_by_expert(expert_in.assignments, num_experts, sum(expert_in.host_rows))
        else:
            groups = group_padded(expert_in.assignments, num_experts, expert_in.capacity)
        rows_PL = retain.step("rows", partial(gather_rows, token_N=groups.token_N, padded=padded), expert_in.rows_RL)
        prob_P = gather_probs(expert_in.assignments.probs, groups.assignment_N, padded)
        num_rows = expert_in.rows_RL.shape[0]
        if prob_at_activation:
            return Permuted(rows_PL, prob_P, _UndoPermute(groups.token_N, num_rows, padded, None), rows)
        return Permuted(rows_PL, None, _UndoPermute(groups.token_N, num_rows, padded, prob_P), rows)

    def unpermute(self, out_PL: Tensor, permuted: Permuted) -> Tensor:
        token_P, num_rows, padded, prob_P = permuted.undo
        out_PL = out_PL if prob_P is None else times_prob(out_PL, prob_P)
        return unpermute_rows(out_PL, token_P, num_rows, padded)


class NoPermutation:
    """Rows have been received in the order of the experts."""

    def permute(
        self,
        expert_in: ExpertInput,
        num_experts: int,
        prob_at_activation: bool,
        retain: Retention = KEEP_ALL,
        multiple: int = 1,
    ) -> Permuted:
        assert multiple == 1 or expert_in.capacity is not None
        prob_P = expert_in.assignments.probs.flatten()
        return Permuted(expert_in.rows_RL, *((prob_P, None) if prob_at_activation else (None, prob_P)))

    def unpermute(self, out_PL: Tensor, permuted: Permuted) -> Tensor:
        return out_PL if permuted.undo is None else times_prob(out_PL, permuted.undo)


NO_PERMUTATION = NoPermutation()


def torch_activation(name: str) -> WeightedActivation:
    return lambda gate_up_PG, prob_P: weighted_activation(gate_up_PG, prob_P, name)


class KernelPermutation:
    """One kernel that moves rows and one that sums them, both along a row map."""

    def __init__(self, kernels: MoEKernels) -> None:
        self.kernels = kernels

    def permute(
        self,
        expert_in: ExpertInput,
        num_experts: int,
        prob_at_activation: bool,
        retain: Retention = KEEP_ALL,
        multiple: int = 1,
    ) -> Permuted:
        rows = None if multiple == 1 or expert_in.capacity is not None else aligned(expert_in.host_rows, multiple)
        row_map, prob_RK = self._row_map(expert_in, num_experts, multiple), expert_in.assignments.probs
        if prob_at_activation:
            permute = partial(self._rows_and_probs, row_map)
            return Permuted(*retain.step("rows", permute, expert_in.rows_RL, prob_RK), (row_map, None), rows)
        rows_PL = retain.step("rows", partial(self._rows, row_map), expert_in.rows_RL)
        return Permuted(rows_PL, None, (row_map, prob_RK), rows)

    def _rows_and_probs(self, row_map: RowMap, rows_RL: Tensor, prob_RK: Tensor) -> tuple[Tensor, Tensor]:
        rows_PL, prob_P = self._move(rows_RL, row_map, prob_RK)
        assert prob_P is not None
        return rows_PL, prob_P

    def _rows(self, row_map: RowMap, rows_RL: Tensor) -> Tensor:
        return self._move(rows_RL, row_map, None)[0]

    def _move(self, rows_RL: Tensor, row_map: RowMap, prob_RK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.kernels.permute(rows_RL, row_map, prob_RK)

    def unpermute(self, out_PL: Tensor, permuted: Permuted) -> Tensor:
        row_map, prob_RK = permuted.undo
        return self.kernels.unpermute(out_PL, row_map, prob_RK)

    def _row_map(self, expert_in: ExpertInput, num_experts: int, multiple: int) -> RowMap:
        if expert_in.capacity is not None:
            return map_padded(expert_in.assignments, num_experts, expert_in.capacity)
        num_rows = sum(aligned(expert_in.host_rows, multiple))
        return self.kernels.map_rows(expert_in.assignments, num_experts, multiple, num_rows)


class NarrowingPermutation(KernelPermutation):
    """The kernel that moves rows narrows them too: their copy along features waits for the first GEMM."""

    def __init__(self, kernels: MoEKernels, cast: Cast, copies: WaitingCopies) -> None:
        super().__init__(kernels)
        self.cast, self.copies = cast, copies

    def _move(self, rows_RL: Tensor, row_map: RowMap, prob_RK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rows_PL, prob_P, copy = self.kernels.permute_cast(rows_RL, row_map, prob_RK, self.cast)
        self.copies.put(rows_PL, copy)
        return rows_PL, prob_P


def kernel_activation(kernels: MoEKernels, name: str) -> WeightedActivation:
    return lambda gate_up_PG, prob_P: kernels.weighted_activation(gate_up_PG, prob_P, name)


class TransformerEnginePermutation:
    """``library`` is transformer_engine.pytorch."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        self.without_rows = TorchPermutation()

    def permute(
        self,
        expert_in: ExpertInput,
        num_experts: int,
        prob_at_activation: bool,
        retain: Retention = KEEP_ALL,
        multiple: int = 1,
    ) -> Permuted:
        """``multiple`` is 1: `rows_can_be_padded` refuses others."""
        if expert_in.capacity is not None:
            raise BackendError(
                "kernels.permute: transformer_engine does not pad capacities; use kernels.permute backend"
            )
        num_rows, library = sum(expert_in.host_rows), self.library
        if num_rows == 0:
            return self.without_rows.permute(expert_in, num_experts, prob_at_activation)
        rows_RL, (experts, probs, kept, _) = expert_in.rows_RL.contiguous(), expert_in.assignments
        # Assignments to experts of other ranks, and dropped ones, fall into one more column, which is cut off.
        column_RK = experts if kept is None else experts.where(kept, num_experts)
        ones_RK = torch.ones_like(column_RK, dtype=torch.int32)
        map_Re = ones_RK.new_zeros(len(rows_RL), num_experts + 1).scatter(1, column_RK, ones_RK)[:, :num_experts]
        prob_Re = probs.new_zeros(len(rows_RL), num_experts + 1).scatter(1, column_RK, probs)[:, :num_experts]
        map_Re, prob_Re = map_Re.contiguous(), prob_Re.contiguous()
        if prob_at_activation:
            rows_PL, prob_P, row_map = library.moe_permute_with_probs(rows_RL, prob_Re, map_Re, num_rows)
            return Permuted(rows_PL, prob_P, (row_map, rows_RL.shape, None))
        rows_PL, row_map = library.moe_permute(rows_RL, map_Re, num_rows)
        return Permuted(rows_PL, None, (row_map, rows_RL.shape, prob_Re))

    def unpermute(self, out_PL: Tensor, permuted: Permuted) -> Tensor:
        if len(out_PL) == 0:
            return self.without_rows.unpermute(out_PL, permuted)
        library, (row_map, shape, prob_Re) = self.library, permuted.undo
        summed_RL: Tensor = library.moe_unpermute(
            out_PL.contiguous(), row_map, merging_probs=prob_Re, restore_shape=shape
        )
        return summed_RL
