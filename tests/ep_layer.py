"""One MoE layer whose experts are on two ranks, and what the host does for it: launches and waits of a rank.

The ranks are processes with gloo, or threads where the library that exchanges rows is a fake of threads. What is
counted is the layer's forward, and its backward from given gradients of its output and of its balance loss: router,
balance loss, dispatch, experts, combine. Parameters have no gradient before, so nothing is accumulated onto one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import cast
from unittest.mock import patch

import torch
from tests.compiled_launches import compiled_counted
from tests.engines.fake_symm_mem import FakeSymmetricMemory
from tests.engines.rank_threads import ThreadProcessGroup, on_rank_threads
from tests.host_work import count_host_work, counted_once
from tests.support import on_ranks
from torch import Tensor

from moefold.comm.process_groups import Group, Groups
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import KernelsConfig
from moefold.config.run import RunConfig
from moefold.moe import routing_policies
from moefold.moe.dispatch.base import Dispatcher
from moefold.moe.dispatch.symmetric_memory import SymmetricExchange, SymmetricMemoryDispatcher, buffer_sizes
from moefold.moe.expert_backends import expert_backend
from moefold.moe.experts import Experts
from moefold.moe.kernels import moe_references
from moefold.moe.layer import MoELayer
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels
from moefold.moe.router import Router
from moefold.moe.topk import choose_topk_reference
from moefold.nn.batch import Batch, whole_batch
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.nn.parallel_interfaces import LocalTokens
from moefold.parallel.dispatchers import dispatcher_for

EP, TOKENS, DIM = 2, 64, 32
MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    expert_hidden_dim=16,
    router=RouterConfig(normalize=True),
    balance=BalanceConfig(microbatch=0.01),
)
# Every expert may get one and a quarter of its even part of a rank's tokens.
PADDED = replace(MOE, capacity=CapacityConfig(factor=1.25, pad=True))
CAPACITY = 20


@dataclass(frozen=True)
class LayerWork:
    """Of one rank: launches by operation, forward and backward; waits of both."""

    forward: dict[str, int] = field(default_factory=dict)
    backward: dict[str, int] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)

    @property
    def found(self) -> tuple[int, int, int]:
        return sum(self.forward.values()), sum(self.backward.values()), len(self.waits)


# Of a run with ``kernels.backend`` and ``kernels.compile``, entered on each rank.
Kernels = Callable[[], AbstractContextManager[MoEKernels]]


def layer_work(
    dispatcher: str, moe: MoEConfig = MOE, kernels: Kernels = lambda: nullcontext(MOE_IN_TORCH)
) -> LayerWork:
    """Of rank 0. ``kernels`` is entered on the rank. Two levels need four ranks, two on each of two hosts."""
    # Entered once, and not by each rank: threads that replace a name at the same time restore one another's value.
    with as_on_a_gpu():
        return _layer_work(dispatcher, moe, kernels)


def _layer_work(dispatcher: str, moe: MoEConfig, kernels: Kernels) -> LayerWork:
    if dispatcher == "symmetric_memory":
        return on_rank_threads(EP, lambda group: _work_of(_symmetric(group, moe), moe, MOE_IN_TORCH, EP))[0]
    hosts = 2 if dispatcher == "two_level" else 1
    ep, inner = EP * hosts, EP if hosts > 1 else 1
    run = RunConfig(
        model=ModelConfig(moe=moe, dim=DIM),
        data=DataConfig(seq_len=TOKENS, micro_batch=1),
        parallel=ParallelConfig(ep=ep, dispatcher=dispatcher, ep_inner=inner),
        kernels=KernelsConfig(
            compile="regions" if kernels in (compiled_counted, triton_and_compiled_counted) else "none"
        ),
    )

    def work(groups: Groups) -> tuple[dict[str, int], dict[str, int], list[str]]:
        with kernels() as chosen:
            found = _work_of(dispatcher_for(run, groups), moe, chosen, ep)
        return found.forward, found.backward, found.waits

    return LayerWork(*on_ranks(work, ep, ep=ep, ep_inner=inner)[0])


@contextmanager
def triton_counted() -> Iterator[MoEKernels]:
    """Interpreted Triton kernels, each launch counted once."""
    from triton.runtime.jit import JITFunction

    from moefold.moe.moe_kernels import triton_kernels
    from moefold.ops.kernels.interpret import interpreting

    # Before: a kernel that is imported inside is interpreted by other means.
    chosen = triton_kernels()
    with interpreting():
        interpreted = JITFunction.run

        def run(kernel: JITFunction, *args: object, **kwargs: object) -> object:
            with counted_once(f"triton.{kernel.fn.__name__}"):
                return interpreted(kernel, *args, **kwargs)

        with patch.object(JITFunction, "run", run):
            yield chosen


@contextmanager
def triton_and_compiled_counted() -> Iterator[MoEKernels]:
    with triton_counted() as chosen, compiled_counted(chosen) as compiled:
        yield compiled


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """``choose_topk`` as GPUs do it; the other way is for CPUs."""
    with (
        patch.object(routing_policies, "choose_topk", choose_topk_reference),
        patch.object(moe_references, "choose_topk", choose_topk_reference),
    ):
        yield


def _work_of(dispatcher: Dispatcher, moe: MoEConfig, kernels: MoEKernels, ep: int) -> LayerWork:
    layer, batch = ep_layer(dispatcher, moe, kernels, ep), one_microbatch()
    x_tD = torch.randn(TOKENS, DIM).bfloat16().requires_grad_()
    # Once before: buffers are allocated, and functions compiled, by the first call.
    _counted_step(layer, x_tD, batch)
    return _counted_step(layer, x_tD, batch)


def _counted_step(layer: MoELayer, x_tD: Tensor, batch: Batch) -> LayerWork:
    layer.zero_grad(set_to_none=True)
    x_tD.grad = None
    outputs: list[Tensor] = []
    ahead = count_host_work(lambda: outputs.extend(_outputs(layer, x_tD, batch)))
    grads = [torch.ones_like(output) for output in outputs]
    back = count_host_work(lambda: torch.autograd.backward(outputs, grads))
    return LayerWork(dict(ahead.launches), dict(back.launches), ahead.waits + back.waits)


def ep_layer(dispatcher: Dispatcher, moe: MoEConfig, kernels: MoEKernels, ep: int = EP) -> MoELayer:
    """In bfloat16, its router in float32, with this rank's part of the experts; without a shared expert."""
    route, balance = kernels.for_router()
    mine = replace(moe, num_experts=moe.num_experts // ep)
    experts = Experts(mine, DIM, expert_backend("grouped", ParameterMatmul(), kernels=kernels)(mine)).bfloat16()
    router = Router(moe, DIM, LocalTokens(), route=route, balance=balance)
    layer = MoELayer(router, dispatcher, experts)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def one_microbatch() -> Batch:
    token = torch.arange(TOKENS)
    batch = whole_batch(token, token, (TOKENS,), step_labels=TOKENS, step_tokens=TOKENS, step_sequences=1)
    # Computed once for a batch, not for each layer.
    assert batch.shards and batch.microbatches and batch.documents
    return batch


def _outputs(layer: MoELayer, x_tD: Tensor, batch: Batch) -> list[Tensor]:
    y_tD, report = layer(x_tD, batch, None)
    return [y_tD, *(loss for loss in report.losses if loss.requires_grad)]


def _symmetric(group: Group, moe: MoEConfig) -> SymmetricMemoryDispatcher:
    fake = _CountedFake(cast(ThreadProcessGroup, group.connected))
    capacity = None if moe.capacity is None else CAPACITY
    sizes = buffer_sizes(moe.num_experts, EP, moe.top_k, TOKENS, capacity, row_bytes=DIM * 2, prob_bytes=4)
    exchange = SymmetricExchange(fake.module(), fake, group, sizes)
    return SymmetricMemoryDispatcher(moe.num_experts, EP, exchange, capacity)


class _CountedFake(FakeSymmetricMemory):
    """Each of its exchanges is one launch."""

    def all_to_all_vdev_2d(self, *args: Tensor, **kwargs: int) -> None:
        with counted_once("symm_mem.all_to_all_vdev_2d"):
            super().all_to_all_vdev_2d(*args, **kwargs)

    def all_to_all_vdev_2d_offset(self, *args: Tensor) -> None:
        with counted_once("symm_mem.all_to_all_vdev_2d_offset"):
            super().all_to_all_vdev_2d_offset(*args)
