"""The row map without sorting: count, add up the counts before, and every choice knows its row.

N choices of all tokens, E experts, B blocks of choices; C choices that a program looks at together.

A choice's row is where its expert's rows begin, plus how many earlier choices went to that expert. Earlier blocks' are
known from their counts; earlier ones in the same block are counted along the block. There are few experts, so a program
keeps one counter for each in registers. Three launches, and the order among equals is that of the choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.moe.kernels.row_map_reference import RowMap, most_rows
from moefold.moe.permute import Assignments
from moefold.ops.kernels.aot_specs import Build, Traffic
from moefold.ops.kernels.benchmark_shapes import MODELS, moe_of

# Counters times choices that a program of 4 warps holds at a time, and how many choices it goes through.
TILE = 2048
BLOCK = 256


@triton.jit
def _hits(expert_N, kept_N, choice_C, num_choices, expert_E, E: tl.constexpr, KEPT: tl.constexpr):
    """Each choice's expert, E if it was dropped or is none; and the same as ones in a table."""
    found_C = tl.load(expert_N + choice_C, mask=choice_C < num_choices, other=E).to(tl.int32)
    if KEPT:
        found_C = tl.where(tl.load(kept_N + choice_C, mask=choice_C < num_choices, other=0) != 0, found_C, E)
    return found_C, (found_C[:, None] == expert_E[None, :]).to(tl.int32)


@triton.jit
def _count(
    expert_N, kept_N, count_BE, num_choices,
    E: tl.constexpr, EP: tl.constexpr, KEPT: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert_E = tl.arange(0, EP)
    count_E = tl.zeros([EP], tl.int32)
    for begin in range(0, BLOCK, C):
        choice_C = tl.program_id(0) * BLOCK + begin + tl.arange(0, C)
        _, hit_CE = _hits(expert_N, kept_N, choice_C, num_choices, expert_E, E, KEPT)
        count_E += tl.sum(hit_CE, 0)
    tl.store(count_BE + tl.program_id(0) * E + expert_E, count_E, mask=expert_E < E)


@triton.jit
def _add_before(
    count_BE, before_BE, start_E, count_E, num_blocks, multiple,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program: what each block's earlier ones have, and where experts' rows begin once filled to a multiple."""
    expert_E = tl.arange(0, EP)
    total_E = tl.zeros([EP], tl.int32)
    for begin in range(0, num_blocks, C):
        block_C = begin + tl.arange(0, C)
        place_CE = block_C[:, None] * E + expert_E[None, :]
        inside_CE = (block_C < num_blocks)[:, None] & (expert_E < E)[None, :]
        count_CE = tl.load(count_BE + place_CE, mask=inside_CE, other=0)
        tl.store(before_BE + place_CE, tl.cumsum(count_CE, 0) - count_CE + total_E[None, :], mask=inside_CE)
        total_E += tl.sum(count_CE, 0)
    end_E = tl.cumsum((total_E + multiple - 1) // multiple * multiple, 0)
    tl.store(count_E + expert_E, total_E, mask=expert_E < E)
    tl.store(start_E + expert_E + 1, end_E, mask=expert_E < E)
    tl.store(start_E, 0)


@triton.jit
def _place(
    expert_N, kept_N, before_BE, start_E, row_N, num_choices,
    E: tl.constexpr, EP: tl.constexpr, KEPT: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert_E = tl.arange(0, EP)
    next_E = tl.load(start_E + expert_E, mask=expert_E < E, other=0)
    next_E += tl.load(before_BE + tl.program_id(0) * E + expert_E, mask=expert_E < E, other=0)
    for begin in range(0, BLOCK, C):
        choice_C = tl.program_id(0) * BLOCK + begin + tl.arange(0, C)
        found_C, hit_CE = _hits(expert_N, kept_N, choice_C, num_choices, expert_E, E, KEPT)
        row_C = tl.sum(hit_CE * (tl.cumsum(hit_CE, 0) - 1 + next_E[None, :]), 1)
        tl.store(row_N + choice_C, tl.where(found_C < E, row_C, -1), mask=choice_C < num_choices)
        next_E += tl.sum(hit_CE, 0)


def map_rows(choices: Assignments, num_experts: int, multiple: int = 1, num_rows: int | None = None) -> RowMap:
    """The twin is ``row_map.map_rows``. ``num_rows``: how many there are with pads, where that is known."""
    expert_tK, kept_tK, device = choices.experts.contiguous(), choices.kept, choices.experts.device
    num_choices, constants = expert_tK.numel(), _constants(num_experts)
    num_blocks = triton.cdiv(num_choices, BLOCK)
    kept_N: Tensor = expert_tK if kept_tK is None else kept_tK.contiguous().view(torch.uint8)
    count_BE = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=device)
    before_BE, row_tK = torch.empty_like(count_BE), torch.empty_like(expert_tK, dtype=torch.int32)
    start_E, count_E = count_BE.new_empty(num_experts + 1), count_BE.new_empty(num_experts)
    which = {**constants, "KEPT": kept_tK is not None, "BLOCK": BLOCK}
    _count[num_blocks,](expert_tK, kept_N, count_BE, num_choices, **which)
    _add_before[1,](count_BE, before_BE, start_E, count_E, num_blocks, multiple, **constants)
    _place[num_blocks,](expert_tK, kept_N, before_BE, start_E, row_tK, num_choices, **which)
    num_rows = most_rows(num_choices, num_experts, multiple) if num_rows is None else num_rows
    return RowMap(row_tK, start_E, count_E, num_rows)


def _constants(num_experts: int) -> dict[str, int]:
    EP = triton.next_power_of_2(num_experts)
    return {"E": num_experts, "EP": EP, "C": min(BLOCK, max(1, TILE // EP))}


def traffic(num_experts: int, top_k: int) -> Traffic:
    """Of all three launches: experts are read twice, a block's counts are written and read, and again once added up."""
    moved = 20 * top_k + 16 * num_experts * top_k / BLOCK
    return Traffic(f"20K + 16EK/{BLOCK}, three launches", moved, 8 * top_k)


def _builds(model: str, moe: MoEConfig) -> tuple[Build, ...]:
    constants = _constants(moe.num_experts)
    which = {**constants, "KEPT": False, "BLOCK": BLOCK}
    choices = {"expert_N": "*i64", "kept_N": "*i64", "num_choices": "i32"}
    return (
        Build(f"row map, counts, {model}", _count, {**choices, "count_BE": "*i32"}, which, registers=48),
        Build(
            f"row map, counts before, {model}", _add_before,
            {"count_BE": "*i32", "before_BE": "*i32", "start_E": "*i32", "count_E": "*i32", "num_blocks": "i32",
             "multiple": "i32"},
            constants, registers=80,
        ),
        Build(
            f"row map, rows, {model}", _place, {**choices, "before_BE": "*i32", "start_E": "*i32", "row_N": "*i32"},
            which, traffic(moe.num_experts, moe.top_k), registers=80,
        ),
    )  # fmt: skip


BUILDS = tuple(build for name, model in MODELS.items() for build in _builds(name, moe_of(model)))
