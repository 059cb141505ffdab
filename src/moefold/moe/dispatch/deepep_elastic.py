"""DeepEP's ``ElasticBuffer`` (version 2): the same exchange as ``deepep``, over NCCL's symmetric memory.

It counts and sends in one call. Three things differ from ``Buffer``. Its size follows from the most tokens that a rank
may send, which must be the same number on every rank. Probs of experts on other ranks arrive as they were sent, so only
the expert's number says which assignments are this rank's. And a dispatch along an earlier handle must be told the
number of experts again: without it the library cannot choose how many SMs to use. ``parallel.dispatch_sms`` goes with
every dispatch (0: its choice); combine uses as many as the dispatch of its handle did.

``deterministic``: rows are sorted by source after they arrived, so that the same routing gives the same bits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import SplitSizeSource, most_rank_tokens
from moefold.moe.dispatch.handle_exchange import Arrived, HandleDispatcher
from moefold.ops.engines import load_engine


class Handle(Protocol):
    num_recv_tokens_per_expert_list: list[int]


class Buffer(Protocol):
    """The part of DeepEP's class that is used; the last value that each returns is an event."""

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        num_experts: int,
        expert_alignment: int = 1,
        handle: object = None,
        do_cpu_sync: bool | None = None,
        num_sms: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Handle, object]: ...

    def combine(
        self, x: Tensor, handle: object, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, object]: ...


class ElasticExchange:
    """``library`` is deep_ep; ``dim`` entries of a row, ``most_tokens`` of any rank in any microbatch; ``num_sms`` of
    its kernels, 0 for its own choice."""

    def __init__(
        self,
        library: ModuleType,
        group: Group,
        num_experts: int,
        top_k: int,
        dim: int,
        most_tokens: int,
        num_sms: int = 0,
    ) -> None:
        self.num_sms = num_sms
        self.library, self.group, self.num_experts = library, group, num_experts
        self.top_k, self.dim, self.most_tokens = top_k, dim, most_tokens
        self._buffer: Buffer | None = None

    @property
    def buffer(self) -> Buffer:
        """Made by the first dispatch: a collective of the ep group that needs the rank's GPU."""
        if self._buffer is None:
            self._buffer = self.library.ElasticBuffer(
                self.group.connected,
                num_max_tokens_per_rank=self.most_tokens,
                hidden=self.dim,
                num_topk=self.top_k,
                deterministic=True,
            )
        return self._buffer

    def dispatch(self, x_tL: Tensor, expert_tK: Tensor, prob_tK: Tensor) -> Arrived:
        buffer = self.buffer
        rows_RL, expert_RK, prob_RK, handle, _ = buffer.dispatch(
            x_tL,
            topk_idx=expert_tK.to(self.library.topk_idx_t),
            topk_weights=prob_tK,
            num_experts=self.num_experts,
            expert_alignment=1,
            do_cpu_sync=True,
            num_sms=self.num_sms,
        )
        return Arrived(rows_RL, expert_RK, prob_RK, handle.num_recv_tokens_per_expert_list, handle)

    def dispatch_again(self, x_tL: Tensor, handle: object) -> Tensor:
        buffer = self.buffer
        rows_RL, _, _, _, _ = buffer.dispatch(x_tL, num_experts=self.num_experts, handle=handle, num_sms=self.num_sms)
        return rows_RL

    def combine(self, rows_RL: Tensor, handle: object, prob_RK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        buffer = self.buffer
        y_tL, prob_tK, _ = buffer.combine(rows_RL, handle, topk_weights=prob_RK)
        return y_tL, prob_tK


# One for all layers of a rank.
_EXCHANGES: WeakKeyDictionary[Groups, ElasticExchange] = WeakKeyDictionary()


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> HandleDispatcher:
    """``host`` is not asked: the library reads its counts itself."""
    moe, ep = run.model.moe, groups["ep"]
    assert moe is not None
    if groups not in _EXCHANGES:
        dim, most_tokens = moe.latent_dim or run.model.dim, most_rank_tokens(run, groups.layout.size("dp"))
        library = load_engine("deepep_elastic")
        sms = run.parallel.dispatch_sms or 0
        _EXCHANGES[groups] = ElasticExchange(library, ep, moe.num_experts, moe.top_k, dim, most_tokens, sms)
    return HandleDispatcher(moe.num_experts // ep.size, _EXCHANGES[groups])
