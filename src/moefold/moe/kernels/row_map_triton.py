"""The row map without a sort: count, take prefix sums of the counts, and write each assignment's row.

An assignment's row is the first row of its expert plus the number of earlier assignments to that expert. Those of
earlier blocks are known from the prefix sums, those of the same block from a cumulative sum along the block. There are
few experts, so a program keeps one counter per expert in registers. Three launches; an expert's rows are in the order
of the assignments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.moe.kernels.moe_references import RowMap, most_rows
from moefold.moe.permute import Assignments
from moefold.ops.kernels.aot_specs import MODELS, Build, Traffic, moe_of

# Counters times assignments that a program of 4 warps holds at a time, and how many assignments it goes through.
TILE = 2048
BLOCK = 256


@triton.jit
def _hits(expert_N, kept_N, assignment_n, num_assignments, expert_E, E: tl.constexpr, KEPT: tl.constexpr):
    """Each assignment's expert, E if it is dropped or past the end; and the same one-hot."""
    found_n = tl.load(expert_N + assignment_n, mask=assignment_n < num_assignments, other=E).to(tl.int32)
    if KEPT:
        found_n = tl.where(
            tl.load(kept_N + assignment_n, mask=assignment_n < num_assignments, other=0) != 0, found_n, E
        )
    return found_n, (found_n[:, None] == expert_E[None, :]).to(tl.int32)


@triton.jit
def _count(
    expert_N, kept_N, count_BE, num_assignments,
    E: tl.constexpr, E_POW2: tl.constexpr, KEPT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert_E = tl.arange(0, E_POW2)
    count_E = tl.zeros([E_POW2], tl.int32)
    for begin in range(0, BLOCK, BLOCK_N):
        assignment_n = tl.program_id(0) * BLOCK + begin + tl.arange(0, BLOCK_N)
        _, hit_nE = _hits(expert_N, kept_N, assignment_n, num_assignments, expert_E, E, KEPT)
        count_E += tl.sum(hit_nE, 0)
    tl.store(count_BE + tl.program_id(0) * E + expert_E, count_E, mask=expert_E < E)


@triton.jit
def _prefix_sums(
    count_BE, before_BE, start_E, count_E, num_blocks, multiple,
    E: tl.constexpr, E_POW2: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: the counts before each block, and the experts' first rows with counts rounded up to a multiple."""
    expert_E = tl.arange(0, E_POW2)
    total_E = tl.zeros([E_POW2], tl.int32)
    for begin in range(0, num_blocks, BLOCK_N):
        block_n = begin + tl.arange(0, BLOCK_N)
        place_nE = block_n[:, None] * E + expert_E[None, :]
        inside_nE = (block_n < num_blocks)[:, None] & (expert_E < E)[None, :]
        count_nE = tl.load(count_BE + place_nE, mask=inside_nE, other=0)
        tl.store(before_BE + place_nE, tl.cumsum(count_nE, 0) - count_nE + total_E[None, :], mask=inside_nE)
        total_E += tl.sum(count_nE, 0)
    end_E = tl.cumsum((total_E + multiple - 1) // multiple * multiple, 0)
    tl.store(count_E + expert_E, total_E, mask=expert_E < E)
    tl.store(start_E + expert_E + 1, end_E, mask=expert_E < E)
    tl.store(start_E, 0)


@triton.jit
def _assign_rows(
    expert_N, kept_N, before_BE, start_E, row_N, num_assignments,
    E: tl.constexpr, E_POW2: tl.constexpr, KEPT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert_E = tl.arange(0, E_POW2)
    next_E = tl.load(start_E + expert_E, mask=expert_E < E, other=0)
    next_E += tl.load(before_BE + tl.program_id(0) * E + expert_E, mask=expert_E < E, other=0)
    for begin in range(0, BLOCK, BLOCK_N):
        assignment_n = tl.program_id(0) * BLOCK + begin + tl.arange(0, BLOCK_N)
        found_n, hit_nE = _hits(expert_N, kept_N, assignment_n, num_assignments, expert_E, E, KEPT)
        row_n = tl.sum(hit_nE * (tl.cumsum(hit_nE, 0) - 1 + next_E[None, :]), 1)
        tl.store(row_N + assignment_n, tl.where(found_n < E, row_n, -1), mask=assignment_n < num_assignments)
        next_E += tl.sum(hit_nE, 0)


def map_rows(assignments: Assignments, num_experts: int, multiple: int = 1, num_rows: int | None = None) -> RowMap:
    """The reference is ``moe_references.map_rows``. ``num_rows``: how many there are with padding, where known."""
    expert_tK, kept_tK, device = assignments.experts.contiguous(), assignments.kept, assignments.experts.device
    num_assignments, constants = expert_tK.numel(), _constants(num_experts)
    num_blocks = triton.cdiv(num_assignments, BLOCK)
    kept_N: Tensor = expert_tK if kept_tK is None else kept_tK.contiguous().view(torch.uint8)
    count_BE = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=device)
    before_BE, row_tK = torch.empty_like(count_BE), torch.empty_like(expert_tK, dtype=torch.int32)
    start_E, count_E = count_BE.new_empty(num_experts + 1), count_BE.new_empty(num_experts)
    which = {**constants, "KEPT": kept_tK is not None, "BLOCK": BLOCK}
    _count[num_blocks,](expert_tK, kept_N, count_BE, num_assignments, **which)
    _prefix_sums[1,](count_BE, before_BE, start_E, count_E, num_blocks, multiple, **constants)
    _assign_rows[num_blocks,](expert_tK, kept_N, before_BE, start_E, row_tK, num_assignments, **which)
    num_rows = most_rows(num_assignments, num_experts, multiple) if num_rows is None else num_rows
    return RowMap(row_tK, start_E, count_E, num_rows)


def _constants(num_experts: int) -> dict[str, int]:
    E_POW2 = triton.next_power_of_2(num_experts)
    return {"E": num_experts, "E_POW2": E_POW2, "BLOCK_N": min(BLOCK, max(1, TILE // E_POW2))}


def traffic(num_experts: int, top_k: int) -> Traffic:
    """Of all three launches: experts are read twice, a block's counts and their prefix sums are written and read."""
    moved = 20 * top_k + 16 * num_experts * top_k / BLOCK
    return Traffic(f"20K + 16EK/{BLOCK}, three launches", moved, 8 * top_k)


def _builds(model: str, moe: MoEConfig) -> tuple[Build, ...]:
    constants = _constants(moe.num_experts)
    which = {**constants, "KEPT": False, "BLOCK": BLOCK}
    assignments = {"expert_N": "*i64", "kept_N": "*i64", "num_assignments": "i32"}
    return (
        Build(f"row map, counts, {model}", _count, {**assignments, "count_BE": "*i32"}, which, registers=48),
        Build(
            f"row map, counts before, {model}", _prefix_sums,
            {"count_BE": "*i32", "before_BE": "*i32", "start_E": "*i32", "count_E": "*i32", "num_blocks": "i32",
             "multiple": "i32"},
            constants, registers=80,
        ),
        Build(
            f"row map, rows, {model}", _assign_rows,
            {**assignments, "before_BE": "*i32", "start_E": "*i32", "row_N": "*i32"},
            which, traffic(moe.num_experts, moe.top_k), registers=80,
        ),
    )  # fmt: skip


BUILDS = tuple(build for name, model in MODELS.items() for build in _builds(name, moe_of(model)))
