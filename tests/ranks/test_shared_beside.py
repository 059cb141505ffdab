"""Shared experts beside dispatch and combine of the same microbatch: the plain layer's bits, and real concurrency."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from tests.marks import slow_except
from torch import Tensor

from moefold.comm.p2p import ThreadCommStream
from moefold.comm.spawn import spawn_ranks
from moefold.config.attention import GQAConfig
from moefold.config.data import DataConfig
from moefold.config.memory import MemoryConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.moe.layer import MoELayer
from moefold.nn.batch import Batch, whole_batch
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.pipeline.runtime import run_schedule
from moefold.schedule.layer_orders import layer_order

WORLD, TOKENS, MICROBATCHES = 4, 24, 3


def run_config(parallel: ParallelConfig, **memory: Any) -> RunConfig:
    return RunConfig(
        seed=3,
        model=ModelConfig(
            vocab_size=64,
            dim=16,
            num_layers=2,
            attention=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8),
            moe=MoEConfig(
                num_experts=8,
                top_k=2,
                expert_hidden_dim=8,
                shared_hidden_dim=12,
                shared_gate=True,
                balance=BalanceConfig(microbatch=0.1),
            ),
        ),
        parallel=parallel,
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(seq_len=TOKENS, global_batch=4 * MICROBATCHES),
        kernels=KernelsConfig(experts="sequential"),
        memory=MemoryConfig(**memory),
    )


def batches_of(rank: int) -> list[Batch]:
    generator, count = torch.Generator().manual_seed(rank), 4 * MICROBATCHES * TOKENS
    found = []
    for _ in range(MICROBATCHES):
        tokens = torch.randint(64, (TOKENS + 1,), generator=generator)
        found.append(whole_batch(tokens[:-1], tokens[1:], (TOKENS,), step_labels=count, step_tokens=count))
    return found


def gradients_of(local_model: LocalModel, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    local_model.sharding.start_step()
    sums = run_schedule(local_model, batches_of(rank))
    return sums.loss, local_model.sharding.reduce_gradients()


LAYOUTS = {
    "all_to_all": ParallelConfig(ep=4),
    "split experts": ParallelConfig(ep=2, etp=2),
    "deduplicated": ParallelConfig(ep=4, dispatcher="deduplicated"),
    "two_level": ParallelConfig(ep=4, dispatcher="two_level", ep_inner=2),
    "all_gather": ParallelConfig(ep=4, dispatcher="all_gather"),
    "rows through shared memory": ParallelConfig(ep=4, cpu_exchange="shared_memory"),
    "flat": ParallelConfig(ep=2, sharding="flat"),
    "deferred weight gradients": ParallelConfig(ep=4, schedule="zb_h1"),
}


def compare(parallel: ParallelConfig, memory: dict[str, Any], rank: int) -> str:
    found = []
    for overlap in ((), ("shared_experts",)):
        run = run_config(replace(parallel, overlap=overlap), **memory)
        groups = groups_of(run, WORLD, rank, timedelta(seconds=120))
        local_model = build_local_model(run, groups, torch.device("cpu"))
        layers = [module for module in local_model.model.modules() if isinstance(module, MoELayer)]
        assert all((layer.overlap is not None) == bool(overlap) for layer in layers) and len(layers) == 2
        found.append(gradients_of(local_model, rank))
    (loss, plain), (loss_beside, beside) = found
    assert torch.equal(loss, loss_beside)
    assert plain.keys() == beside.keys()
    return ", ".join(name for name in plain if not torch.equal(plain[name], beside[name]))


@pytest.mark.parametrize("layout", slow_except(list(LAYOUTS), "all_to_all", "deduplicated"))
def test_every_bit_is_that_of_the_plain_layer(layout: str) -> None:
    assert spawn_ranks(partial(compare, LAYOUTS[layout], {}), WORLD) == [""] * WORLD


@pytest.mark.slow
def test_with_recomputed_attention_too() -> None:
    assert spawn_ranks(partial(compare, LAYOUTS["all_to_all"], {"recompute": ("attention",)}), WORLD) == [""] * WORLD


class Watched(ThreadCommStream):
    """Writes down when exchanges are submitted and waited for."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def submit(self, work: Any) -> Any:
        self.log.append("submit")
        return super().submit(work)

    def wait(self, handle: Any, meanwhile: Any) -> Any:
        self.log.append("wait")
        return super().wait(handle, meanwhile)


def observed(rank: int) -> list[str]:
    """What one layer's forward and backward do, in the order in which they do it."""
    run = run_config(ParallelConfig(ep=4, overlap=("shared_experts",)))
    local_model = build_local_model(run, groups_of(run, WORLD, rank, timedelta(seconds=120)), torch.device("cpu"))
    local_model.sharding.start_step()
    layer = next(module for module in local_model.model.modules() if isinstance(module, MoELayer))
    assert layer.overlap is not None and layer.shared is not None
    log: list[str] = []
    layer.overlap.exchanges.stream = Watched(log)
    shared = layer.shared
    to_hidden, from_hidden = shared.to_hidden, shared.from_hidden

    def up(x_tD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        log.append("up")
        hidden = to_hidden(x_tD, batch)
        hidden[0].register_hook(lambda _: log.append("up backward"))
        return hidden

    def down(hidden_SF: tuple[Tensor, ...], batch: Batch) -> Tensor:
        log.append("down")
        out = from_hidden(hidden_SF, batch)
        out.register_hook(lambda _: log.append("down backward"))
        return out

    shared.to_hidden, shared.from_hidden = up, down  # type: ignore[method-assign]
    x = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    for unit in (module for module in local_model.model.modules() if hasattr(module, "unshard")):
        unit.unshard()
    y, _ = layer(x, batches_of(rank)[0], None)
    log.append("backward")
    y.square().sum().backward()
    assert x.grad is not None
    return log


def test_the_shared_expert_runs_between_start_and_wait_in_both_directions() -> None:
    forward = ["submit", "up", "wait", "submit", "down", "wait"]
    backward = ["submit", "down backward", "wait", "submit", "up backward", "wait"]
    assert spawn_ranks(observed, WORLD) == [[*forward, "backward", *backward]] * WORLD


def names_of(rank: int) -> list[str]:
    run = run_config(ParallelConfig(ep=4, overlap=("shared_experts",)))
    local_model = build_local_model(run, groups_of(run, WORLD, rank, timedelta(seconds=120)), torch.device("cpu"))
    layer = next(module for module in local_model.model.modules() if isinstance(module, MoELayer))
    return [phase.name for phase in layer.phases(batches_of(0)[0], None)]


def test_phases_are_the_named_order() -> None:
    experts = ("experts_up", "activation", "experts_down")
    planned = [each.name for each in layer_order("shared_experts").order if each.direction == "F"]
    planned = ["experts" if name == "experts_up" else name for name in planned if name not in experts[1:]]
    assert spawn_ranks(names_of, WORLD)[0] == planned[1:] and planned[0] == "attention"
