"""A fake of DeepEP's ``Buffer`` on CPU: refuses what its C++ side refuses, keeps count of handles, and computes.

What is refused was read in csrc/legacy/buffer.hpp. Received rows come in a random order, because the library's contract
names none. A handle may be sent along once again, combined once without and once with weights, and only by the buffer
that made it, while that lives.
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from tests.engines.rank_threads import ThreadProcessGroup, require
from torch import Tensor

_ROW_ALIGNMENT, _BUFFER_ALIGNMENT = 16, 128
_MAX_HOST_RANKS = 8


class Config:
    """Sizes that only have to be enough; the real ones depend on the number of SMs."""

    def __init__(self, num_sms: int = 20) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        require(num_ranks < _MAX_HOST_RANKS or num_ranks % _MAX_HOST_RANKS == 0, "hosts are not full")
        return hidden_bytes * num_ranks * 1024

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= _MAX_HOST_RANKS else hidden_bytes * num_ranks * 256


class _Route:
    """Where the rows of one dispatch came from, and how often its handle was used."""

    def __init__(self, num_tokens: int, source_R: list[tuple[int, int]]) -> None:
        self.num_tokens, self.source_R = num_tokens, source_R
        self.uses: Counter[str] = Counter()

    def use(self, how: str) -> None:
        self.uses[how] += 1
        require(self.uses[how] == 1, f"a handle is used for {how} a second time")


def check_rows(x: Tensor) -> None:
    require(x.dim() == 2 and x.is_contiguous(), "rows must be a contiguous matrix")
    require(x.dtype == torch.bfloat16, f"rows must be bfloat16, not {x.dtype}")
    require(x.shape[1] * x.element_size() % _ROW_ALIGNMENT == 0, "rows must fill a multiple of 16 bytes")


def check_weights(weights: Tensor, rows: int, choices: int) -> None:
    require(weights.dtype == torch.float32 and weights.is_contiguous(), "weights must be contiguous float32")
    require(weights.shape == (rows, choices), f"weights are {tuple(weights.shape)}, rows {rows} x {choices}")


class RouteTable:
    """Routes by handle, and the sums along them: what both kinds of buffer share."""

    def __init__(self, group: ThreadProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.alive = True
        self.random = torch.Generator().manual_seed(17 + self.rank)
        self._routes: dict[int, tuple[object, _Route]] = {}

    def add(self, key: object, route: _Route) -> None:
        self._routes[id(key)] = (key, route)

    def of(self, key: object) -> _Route:
        require(self.alive, "the buffer was destroyed")
        require(id(key) in self._routes, "the handle was made by another buffer")
        return self._routes[id(key)][1]

    def sources(self, mask_of_rank: list[Tensor]) -> list[tuple[int, int]]:
        """(rank, token) of every row that comes here, in random order."""
        found = [(rank, token) for rank, mask in enumerate(mask_of_rank) for token in mask.nonzero().flatten().tolist()]
        order = torch.randperm(len(found), generator=self.random).tolist()
        return [found[place] for place in order]

    def take(self, sources: list[tuple[int, int]], of_rank: list[Tensor]) -> Tensor:
        like = of_rank[self.rank]
        rows = [of_rank[rank][token] for rank, token in sources]
        return torch.stack(rows) if rows else like.new_empty(0, *like.shape[1:])

    def sum_back(self, call: str, route: _Route, rows: Tensor) -> Tensor:
        """Summed in float32, as the library does it, and rounded once."""
        everything = self.group.exchange(call, (route.source_R, rows))
        summed = torch.zeros(route.num_tokens, *rows.shape[1:])
        for sources, values in everything:
            for (rank, token), value in zip(sources, values, strict=True):
                if rank == self.rank:
                    summed[token] += value.float()
        return summed.to(rows.dtype)


class Buffer:
    num_sms: ClassVar[int] = 20
    ranks_with_a_config: ClassVar[tuple[int, ...]] = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)

    def __init__(self, group: ThreadProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        require(num_nvl_bytes > 0 and num_nvl_bytes % _BUFFER_ALIGNMENT == 0, f"{num_nvl_bytes} bytes for NVLink")
        require(num_rdma_bytes % _BUFFER_ALIGNMENT == 0, f"{num_rdma_bytes} bytes for RDMA")
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.routes = RouteTable(group)
        group.exchange("Buffer", None)

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        require(new_num_sms % 2 == 0, "The SM count must be even")
        cls.num_sms = new_num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        require(num_ranks in cls.ranks_with_a_config, f"Unsupported number of EP ranks: {num_ranks}")
        return Config(cls.num_sms)

    get_combine_config = get_dispatch_config

    def destroy(self) -> None:
        self.routes.alive = False

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        require(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx must be a contiguous matrix")
        require(topk_idx.dtype == torch.int64, f"topk_idx must be int64, not {topk_idx.dtype}")
        require(bool(((topk_idx >= -1) & (topk_idx < num_experts)).all()), "an expert's number is out of range")
        size = self.group.size()
        chosen = topk_idx[topk_idx >= 0]
        per_expert = torch.bincount(chosen, minlength=num_experts).int()
        mask = torch.zeros(len(topk_idx), size, dtype=torch.bool)
        for token, row in enumerate(topk_idx.tolist()):
            for expert in row:
                if expert >= 0:
                    mask[token, expert // (num_experts // size)] = True
        return mask.sum(0).int(), None, per_expert, mask, SimpleNamespace(event=None)

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
    ) -> tuple[Any, ...]:
        check_rows(x)
        event = SimpleNamespace(event=None)
        if handle is not None:
            require(topk_idx is None and topk_weights is None, "a handle brings its own experts")
            route = self.routes.of(handle[0])
            route.use("dispatch")
            require(len(x) == route.num_tokens, f"{len(x)} rows along a handle of {route.num_tokens}")
            of_rank = self.group.exchange("dispatch again", x)
            return self.routes.take(route.source_R, of_rank), None, None, None, None, event
        assert topk_idx is not None and topk_weights is not None and is_token_in_rank is not None
        assert num_tokens_per_expert is not None and num_tokens_per_rank is not None
        num_experts = len(num_tokens_per_expert)
        wanted = self.get_dispatch_layout(topk_idx, num_experts)
        given = (num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank)
        for ours, theirs in zip(wanted, given, strict=False):
            require(ours is theirs is None or torch.equal(ours, theirs), "the layout is not that of topk_idx")
            require(ours is None or ours.dtype == theirs.dtype, "the layout's dtypes were changed")
        check_weights(topk_weights, *topk_idx.shape)
        require(len(x) == len(topk_idx), "rows and experts differ in number")
        everything = self.group.exchange("dispatch", (x, topk_idx, topk_weights, is_token_in_rank))
        rank, num_local = self.group.rank(), num_experts // self.group.size()
        sources = self.routes.sources([mask[:, rank] for *_, mask in everything])
        rows, expert, weight = (self.routes.take(sources, [each[part] for each in everything]) for part in range(3))
        local = expert - rank * num_local
        here = (local >= 0) & (local < num_local)
        local, weight = local.where(here, -1), weight.where(here, 0)
        counts = torch.bincount(local[here], minlength=num_local).tolist()
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts]
        made = tuple(torch.empty(0, dtype=torch.int32) for _ in range(6))
        self.routes.add(made[0], _Route(len(x), sources))
        return rows, local, weight, aligned, made, event

    def combine(
        self, x: Tensor, handle: tuple[Tensor, ...], topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Any]:
        check_rows(x)
        route = self.routes.of(handle[0])
        route.use("combine" if topk_weights is None else "combine with weights")
        require(len(x) == len(route.source_R), f"{len(x)} rows along a handle of {len(route.source_R)}")
        summed, weights = self.routes.sum_back("combine", route, x), None
        if topk_weights is not None:
            check_weights(topk_weights, len(x), topk_weights.shape[1])
            weights = self.routes.sum_back("combine weights", route, topk_weights)
        return summed, weights, SimpleNamespace(event=None)


def fake_deep_ep(**names: Any) -> ModuleType:
    """The module, with more names or others."""
    module = ModuleType("deep_ep")
    module.__dict__.update({"Buffer": Buffer, "topk_idx_t": torch.int64} | names)
    return module
