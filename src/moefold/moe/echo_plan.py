"""Which experts are cloned where, and which rows their clones compute: the planner of ECHO.

ECHO: elastic cloning of hot experts (Megatron Core's report, section 4.3.7). A rank with more rows than the mean lends
its hottest experts for one microbatch to ranks with fewer, each of which has a few spare slots. The plan is a function
of how many rows each expert has on all ranks together. Every rank computes it from the same numbers, so that no message
says it; all shapes are fixed, so that nothing is read back from the device.

Bin packing, one clone per round, as many rounds as there are slots: of the fullest rank its hottest expert gets a clone
on the emptiest rank that has a free slot, and as many rows as bring the first of the two to the mean. A clone for fewer
than ``min_rows`` rows is not worth its weights, which have to be sent (`plan/echo_cost.py`: the break-even). The same
rules in loops are in `plan/clone_loads.py`.

An expert's rows are numbered by source rank, and at the source by assignment. The first ones stay at home, and the
others are those of the clones, in the order of their slots. So each source knows where each of its rows goes.

Ranks have places: those of their own experts, then those of their slots. A dispatcher that is built for that many
experts moves rows to places and knows nothing of clones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.plan.clone_loads import Clone, EchoSizes


class ClonePlan(NamedTuple):
    """The experts in the slots of all ranks (-1: none), rows of each slot, and rows of each expert that stay home."""

    expert_N: Tensor
    rows_N: Tensor
    home_rows_E: Tensor


def plan_clones(rows_E: Tensor, sizes: EchoSizes, min_rows: int = 1) -> ClonePlan:
    """``rows_E``: how many rows each expert has on all ranks together."""
    num_ranks, slots, each = sizes.num_ranks, sizes.slots, sizes.experts_each
    home_E, load_W = rows_E.clone(), rows_E.view(num_ranks, each).sum(1)
    mean = (rows_E.sum(0, keepdim=True) + num_ranks - 1) // num_ranks
    free_W = torch.full_like(load_W, slots)
    expert_N, rows_N = (rows_E.new_full((num_ranks * slots,), value) for value in (-1, 0))
    for _ in range(num_ranks * slots):
        hot = load_W.argmax(0, keepdim=True)
        cold = load_W.masked_fill(free_W == 0, torch.iinfo(load_W.dtype).max).argmin(0, keepdim=True)
        expert = hot * each + home_E.view(num_ranks, each).index_select(0, hot).argmax(1)
        over, under, free = load_W.gather(0, hot) - mean, mean - load_W.gather(0, cold), free_W.gather(0, cold)
        moved = torch.minimum(torch.minimum(over, under), home_E.gather(0, expert))
        worth = (moved >= min_rows) & (free > 0)
        moved = moved * worth
        # Without a free slot the last one is named, and stays as it is.
        slot = cold * slots + (slots - free).clamp(max=slots - 1)
        expert_N.scatter_(0, slot, torch.where(worth, expert, expert_N.gather(0, slot)))
        rows_N.scatter_add_(0, slot, moved)
        home_E.scatter_add_(0, expert, -moved)
        load_W.scatter_add_(0, hot, -moved).scatter_add_(0, cold, moved)
        free_W.scatter_add_(0, cold, -worth.to(free_W.dtype))
    return ClonePlan(expert_N, rows_N, home_E)


def places_of_rows(expert_tK: Tensor, number_tK: Tensor, plan: ClonePlan, sizes: EchoSizes) -> Tensor:
    """Where each assignment is computed, given its number among the rows of its expert on all ranks.

    Runs of rows are laid on a line by expert: those that stay at home, then those of the clones. A row's run is found
    by its position on the line. Assignments that are not kept get some place.
    """
    device, dtype, num_experts = expert_tK.device, plan.rows_N.dtype, sizes.num_experts
    own_E = torch.arange(num_experts, device=device, dtype=dtype)
    slot_N = torch.arange(len(plan.rows_N), device=device, dtype=dtype)
    home_place_E = own_E // sizes.experts_each * sizes.places_each + own_E % sizes.experts_each
    slot_place_N = slot_N // sizes.slots * sizes.places_each + sizes.experts_each + slot_N % sizes.slots
    # Empty slots belong to no expert and come last.
    owner_N = torch.cat([own_E, plan.expert_N.where(plan.expert_N >= 0, num_experts)])
    order_N = owner_N.argsort(stable=True)
    run_N = torch.cat([plan.home_rows_E, plan.rows_N]).index_select(0, order_N)
    place_N = torch.cat([home_place_E, slot_place_N]).index_select(0, order_N)
    end_N = run_N.cumsum(0)
    # Where each expert's runs begin; slots without one count for one more expert.
    all_E = torch.cat([plan.home_rows_E, plan.rows_N.new_zeros(1)]).index_add_(0, owner_N[num_experts:], plan.rows_N)
    first_E = all_E.cumsum(0) - all_E
    position_tK = first_E.index_select(0, expert_tK.flatten()).view_as(expert_tK) + number_tK
    run_tK = torch.searchsorted(end_N, position_tK, right=True).clamp_(max=len(end_N) - 1)
    return place_N.index_select(0, run_tK.flatten()).view_as(expert_tK).to(expert_tK.dtype)


def places_of_rows_reference(experts: list[list[int]], clones: list[Clone], sizes: EchoSizes) -> list[list[int]]:
    """Of all assignments of all source ranks (``experts``: those of each source in order), one by one."""
    left = [0] * sizes.num_experts
    for source in experts:
        for expert in source:
            left[expert] += 1
    places: dict[int, list[int]] = {expert: [] for expert in range(sizes.num_experts)}
    for slot, expert, moved in sorted(clones):
        rank, index = divmod(slot, sizes.slots)
        places[expert] += [rank * sizes.places_each + sizes.experts_each + index] * moved
        left[expert] -= moved
    for expert, number in enumerate(left):
        rank, index = divmod(expert, sizes.experts_each)
        places[expert] = [rank * sizes.places_each + index] * number + places[expert]
    return [[places[expert].pop(0) for expert in source] for source in experts]
