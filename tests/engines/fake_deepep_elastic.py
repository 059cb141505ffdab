"""A fake of DeepEP's ``ElasticBuffer`` on CPU; what it refuses was read in csrc/elastic/buffer.hpp and in the class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tests.engines.fake_deepep import RouteTable, _Route, check_rows, check_weights
from tests.engines.rank_threads import ThreadProcessGroup, require
from torch import Tensor


class EPHandle:
    def __init__(self, num_experts: int, topk_idx: Tensor, per_expert: list[int], num_sms: int) -> None:
        self.num_experts, self.topk_idx, self.num_sms = num_experts, topk_idx, num_sms
        self.num_recv_tokens_per_expert_list = per_expert


class ElasticBuffer:
    def __init__(
        self,
        group: ThreadProcessGroup,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        deterministic: bool = False,
    ) -> None:
        require(num_max_tokens_per_rank > 0 and hidden > 0, "a buffer without a size")
        sizes = group.exchange("ElasticBuffer", (num_max_tokens_per_rank, hidden, num_topk))
        require(len(set(sizes)) == 1, f"ranks disagree about the buffer's size: {sizes}")
        self.group, self.most_tokens, self.hidden = group, num_max_tokens_per_rank, hidden
        self.routes = RouteTable(group)

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        handle: EPHandle | None = None,
        do_cpu_sync: bool | None = None,
    ) -> tuple[Any, ...]:
        check_rows(x)
        require(x.shape[1] == self.hidden, f"rows of {x.shape[1]} in a buffer for {self.hidden}")
        require(len(x) <= self.most_tokens, f"{len(x)} tokens in a buffer for {self.most_tokens}")
        # get_theoretical_num_sms computes with it before it is taken from the handle.
        assert num_experts is not None, "the number of SMs cannot be chosen without num_experts"
        event = SimpleNamespace(event=None)
        if handle is not None:
            require(num_sms == handle.num_sms, f"{num_sms} SMs along a handle of {handle.num_sms}")
            require(topk_idx is None and not do_cpu_sync, "a handle brings its own experts and counts")
            require(num_experts == handle.num_experts, "another number of experts than the handle's")
            route = self.routes.of(handle)
            route.use("dispatch")
            require(len(x) == route.num_tokens, f"{len(x)} rows along a handle of {route.num_tokens}")
            of_rank = self.group.exchange("dispatch again", x)
            return self.routes.take(route.source_R, of_rank), None, None, handle, event
        assert topk_idx is not None and topk_weights is not None
        require(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous(), "topk_idx must be contiguous topk_idx_t")
        require(topk_idx.dim() == 2 and len(topk_idx) == len(x), "topk_idx must have a row for every token")
        check_weights(topk_weights, *topk_idx.shape)
        everything = self.group.exchange("dispatch", (x, topk_idx, topk_weights))
        rank, num_local = self.group.rank(), num_experts // self.group.size()
        mine = [(each[1] // num_local == rank).where(each[1] >= 0, False).any(1) for each in everything]
        sources = self.routes.sources(mine)
        rows, expert, weight = (self.routes.take(sources, [each[part] for each in everything]) for part in range(3))
        local = expert - rank * num_local
        here = (expert >= 0) & (local >= 0) & (local < num_local)
        made = EPHandle(num_experts, topk_idx, torch.bincount(local[here], minlength=num_local).tolist(), num_sms)
        self.routes.add(made, _Route(len(x), sources))
        # Weights of other ranks' experts are passed on as they came.
        return rows, local.where(here, -1), weight, made, event

    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Any]:
        check_rows(x)
        route = self.routes.of(handle)
        route.use("combine" if topk_weights is None else "combine with weights")
        require(len(x) == len(route.source_R), f"{len(x)} rows along a handle of {len(route.source_R)}")
        summed, weights = self.routes.sum_back("combine", route, x), None
        if topk_weights is not None:
            check_weights(topk_weights, len(x), handle.topk_idx.shape[1])
            weights = self.routes.sum_back("combine weights", route, topk_weights)
        return summed, weights, SimpleNamespace(event=None)
