"""DeepEP's ``Buffer``: deduplicated dispatch and combine over NVLink inside a host and RDMA between hosts.

The calls are those of the high-throughput kernels for training: ``get_dispatch_layout`` counts on the device,
``dispatch`` sends and waits on the host for the number of rows to receive (one host read per layer), ``combine`` adds
up. Each waits for the current stream before it starts and makes the current stream wait for its end, so no events are
passed, and all tensors are allocated on the current stream.

The buffer of an ep group is shared by all layers. It is made by the first dispatch, because making it is a collective
of the ep group and needs the rank's GPU; its constructor exchanges memory handles by object collectives of its own.
Ranks of a host must be neighbours in the ep group, eight of them unless the group is smaller.

How many SMs the kernels use (``parallel.dispatch_sms``) is a number of the class, which its configurations are made
with: it is set before the buffer's size is asked for, once per process.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import SplitSizeSource
from moefold.moe.dispatch.handle_exchange import ROW_DTYPE, Arrived, HandleDispatcher
from moefold.ops.engines import load_engine

# Experts of received rows, their probs, rows per expert and the handle are None where the rows went along a handle.
Dispatched = tuple[Tensor, Tensor, Tensor, list[int], object, object]


class Buffer(Protocol):
    """The part of DeepEP's class that is used; the last value that each returns is an event."""

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, object]: ...

    def dispatch(
        self,
        x: Tensor,
        handle: object = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
    ) -> Dispatched: ...

    def combine(
        self, x: Tensor, handle: object, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, object]: ...


class BufferExchange:
    """``library`` is deep_ep; ``dim`` entries of a row; ``num_sms``: of its kernels, None for its own choice."""

    def __init__(
        self, library: ModuleType, group: Group, num_experts: int, dim: int, num_sms: int | None = None
    ) -> None:
        self.library, self.group, self.num_experts, self.num_sms = library, group, num_experts, num_sms
        self.row_bytes = dim * ROW_DTYPE.itemsize
        # Version 1 has no name for the type of expert numbers, and takes int64.
        self.index_dtype: torch.dtype = getattr(library, "topk_idx_t", torch.int64)
        self._buffer: Buffer | None = None

    @property
    def buffer(self) -> Buffer:
        if self._buffer is None:
            if self.num_sms is not None:
                self.library.Buffer.set_num_sms(self.num_sms)
            self._buffer = new_buffer(self.library, self.group, self.row_bytes)
        return self._buffer

    def dispatch(self, x_tL: Tensor, expert_tK: Tensor, prob_tK: Tensor) -> Arrived:
        buffer, expert_tK = self.buffer, expert_tK.to(self.index_dtype)
        rows_per_rank, rows_per_rdma_rank, rows_per_expert, mask_tW, _ = buffer.get_dispatch_layout(
            expert_tK, self.num_experts
        )
        rows_RL, expert_RK, prob_RK, received_per_expert, handle, _ = buffer.dispatch(
            x_tL,
            topk_idx=expert_tK,
            topk_weights=prob_tK,
            num_tokens_per_rank=rows_per_rank,
            num_tokens_per_rdma_rank=rows_per_rdma_rank,
            is_token_in_rank=mask_tW,
            num_tokens_per_expert=rows_per_expert,
            expert_alignment=1,
        )
        return Arrived(rows_RL, expert_RK, prob_RK, received_per_expert, handle)

    def dispatch_again(self, x_tL: Tensor, handle: object) -> Tensor:
        buffer = self.buffer
        rows_RL, _, _, _, _, _ = buffer.dispatch(x_tL, handle=handle)
        return rows_RL

    def combine(self, rows_RL: Tensor, handle: object, prob_RK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        buffer = self.buffer
        y_tL, prob_tK, _ = buffer.combine(rows_RL, handle, topk_weights=prob_RK)
        return y_tL, prob_tK


def new_buffer(library: ModuleType, group: Group, row_bytes: int) -> Buffer:
    """Large enough for the library's recommended dispatch and combine of this many ranks."""
    recommended = library.Buffer.get_dispatch_config(group.size), library.Buffer.get_combine_config(group.size)
    made: Buffer = library.Buffer(
        group.connected,
        num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row_bytes, group.size) for config in recommended),
        num_rdma_bytes=max(config.get_rdma_buffer_size_hint(row_bytes, group.size) for config in recommended),
    )
    return made


# One for all layers of a rank.
_EXCHANGES: WeakKeyDictionary[Groups, BufferExchange] = WeakKeyDictionary()


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> HandleDispatcher:
    """``host`` is not asked: the library reads its counts itself."""
    moe, ep = run.model.moe, groups["ep"]
    assert moe is not None
    if groups not in _EXCHANGES:
        library, dim = load_engine("deepep"), moe.latent_dim or run.model.dim
        _EXCHANGES[groups] = BufferExchange(library, ep, moe.num_experts, dim, run.parallel.dispatch_sms)
    return HandleDispatcher(moe.num_experts // ep.size, _EXCHANGES[groups])
