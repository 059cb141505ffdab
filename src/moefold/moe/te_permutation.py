"""Permuting rows by Transformer Engine (``kernels.permute: transformer_engine``), between any grouped GEMMs.

Its ``moe_permute`` takes a map of rows to experts, [R, e] of 0 and 1, where moefold has expert numbers [R, K]; probs
have the same shape. Rows come out sorted by expert and then in their own order, as with moefold's own permutation. The
library refuses an empty permutation, so that a rank without rows uses torch's.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moefold.errors import BackendError
from moefold.moe.dispatch.base import ExpertInput
from moefold.moe.grouped_experts import Permuted, TorchPermutation
from moefold.nn.step_retention import KEEP_ALL, Retention


class TransformerEnginePermutation:
    """``library`` is transformer_engine.pytorch."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        self.without_rows = TorchPermutation()

    def permute(
        self, expert_in: ExpertInput, num_experts: int, prob_at_activation: bool, retain: Retention = KEEP_ALL
    ) -> Permuted:
        if expert_in.capacity is not None:
            raise BackendError(
                "kernels.permute: transformer_engine does not pad capacities; use kernels.permute backend"
            )
        num_rows, library = sum(expert_in.rows_per_expert), self.library
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
