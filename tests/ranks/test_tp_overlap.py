"""Tensor parallelism in chunks: losses and gradients of the plain twin, in the planned order, with real concurrency."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
from tests.marks import slow_except
from tests.ranks.test_shared_beside import Watched
from torch import Tensor

from moefold.checks.run_all import problems
from moefold.comm.p2p import ThreadCommStream
from moefold.comm.process_groups import Groups, Ledger
from moefold.comm.spawn import spawn_ranks
from moefold.config.attention import GatedDeltaNetConfig, GQAConfig, MLAConfig
from moefold.config.data import DataConfig
from moefold.config.memory import MemoryConfig, RetainConfig
from moefold.config.model import LoraConfig, ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import Overlap, ParallelConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.nn.batch import Batch, context_shard, whole_batch
from moefold.nn.layers import FeedForward
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.parallel.parallelize import build_local_model, groups_of
from moefold.parallel.tensor_parallel import ChunkedTokenShards, TokenShards
from moefold.pipeline.runtime import run_schedule
from moefold.topology.folded_layout import fold

MICROBATCHES = 2
TP: tuple[Overlap, ...] = ("tensor_parallel",)
GATED = GQAConfig(num_heads=4, num_kv_heads=4, head_dim=8, qkv_bias=True, out_bias=True, output_gate=True, sinks=True)
MOE = MoEConfig(num_experts=4, top_k=2, expert_hidden_dim=8, shared_hidden_dim=12, shared_gate=True)


def run_config(parallel: ParallelConfig, seq_len: int = 24, **model: object) -> RunConfig:
    attention = GQAConfig(num_heads=4, num_kv_heads=4, head_dim=8)
    base = ModelConfig(
        vocab_size=64, dim=16, num_layers=2, num_dense_layers=1, dense_hidden_dim=20, attention=attention
    )
    return RunConfig(
        seed=3,
        model=replace(replace(base, moe=MOE), **model),  # type: ignore[arg-type]
        parallel=parallel,
        precision=PrecisionConfig(compute="float64", params="float64"),
        data=DataConfig(seq_len=seq_len, global_batch=4 * MICROBATCHES),
        kernels=KernelsConfig(experts="sequential"),
    )


def retained(run: RunConfig, **steps: str) -> RunConfig:
    return replace(run, memory=MemoryConfig(retain=RetainConfig(**steps)))  # type: ignore[arg-type]


MLA = MLAConfig(num_heads=4, q_latent=12, kv_latent=8, nope_dim=4, rope_dim=4, value_dim=6)
TWO, FOUR = (ParallelConfig(tp=tp, etp=1, overlap=TP) for tp in (2, 4))
# The world's size, and the run.
RUNS: dict[str, tuple[int, RunConfig]] = {
    "two ranks": (2, run_config(TWO)),
    "four ranks, four chunks": (4, run_config(replace(FOUR, tp_chunks=4, ep=2))),
    # 23 tokens on four ranks: shards of 6 and 5, chunks of 2 and 1.
    "uneven": (4, run_config(replace(FOUR, tp_chunks=4), seq_len=23)),
    "more chunks than tokens": (4, run_config(replace(FOUR, tp_chunks=9), seq_len=6)),
    "fewer tokens than ranks": (4, run_config(replace(FOUR, tp_chunks=3), seq_len=3)),
    "latent attention": (2, run_config(replace(TWO, tp_chunks=3), 23, attention=MLA)),
    "latent attention, no query latent": (2, run_config(TWO, 23, attention=replace(MLA, q_latent=None))),
    "gate, biases and sinks": (2, run_config(TWO, 23, attention=GATED)),
    "linear attention": (
        2,
        run_config(TWO, 23, linear_attention=GatedDeltaNetConfig(2, 4, 4, 6, 2, 2, 4)),
    ),
    "norms over all heads": (2, run_config(TWO, attention=replace(GATED, output_gate=False, qk_norm="full"))),
    "contexts": (4, run_config(replace(TWO, cp=2), 23)),
    "flat": (4, run_config(replace(TWO, sharding="flat"))),
    "deferred weight gradients": (2, run_config(replace(TWO, schedule="zb_h1"))),
    "pairs": (4, run_config(replace(TWO, ep=2, schedule="1f1b_overlapped"))),
    "pipeline": (4, run_config(replace(TWO, pp=2, ep=2, schedule="zb_v", vpp=2), num_layers=4)),
    "shared expert beside": (4, run_config(replace(TWO, ep=4, overlap=("shared_experts", *TP), exchange_chunks=2))),
    "discarded": (2, retained(run_config(TWO), dense="discard", shared="discard", attention_norm="discard")),
    "offloaded": (2, retained(run_config(TWO), core="offload", feed_norm="offload", attention_norm="offload")),
    "adapters": (2, run_config(TWO, lora=LoraConfig(rank=2, targets=("*",)))),
}


def batches_of(run: RunConfig, groups: Groups) -> list[Batch]:
    """Ranks of one model-parallel group see the same tokens, each its context's."""
    generator, length = torch.Generator().manual_seed(groups.layout.index("dp", groups.rank)), run.data.seq_len
    found = []
    for _ in range(MICROBATCHES):
        tokens = torch.randint(64, (length + 1,), generator=generator)
        batch = whole_batch(
            tokens[:-1],
            tokens[1:],
            (length,),
            step_labels=100,
            step_tokens=100,
            context_size=run.parallel.cp,
            tensor_size=run.parallel.tp,
        )
        found.append(context_shard(batch, groups["cp"].index))
    return found


def gradients_of(run: RunConfig, world: int, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    groups = groups_of(run, world, rank, timedelta(seconds=120))
    local_model = build_local_model(run, groups, torch.device("cpu"))
    kinds = {type(module.tokens) for module in local_model.model.modules() if hasattr(module, "tokens")}
    assert kinds == {ChunkedTokenShards if "tensor_parallel" in run.parallel.overlap else TokenShards}
    local_model.sharding.start_step()
    sums = run_schedule(local_model, batches_of(run, groups))
    return sums.loss, local_model.sharding.reduce_gradients()


def compare(world: int, run: RunConfig, rank: int) -> str:
    rest = tuple(name for name in run.parallel.overlap if name != "tensor_parallel")
    plain_run = replace(run, parallel=replace(run.parallel, overlap=rest, tp_chunks=2))
    loss, plain = gradients_of(plain_run, world, rank)
    loss_in_chunks, in_chunks = gradients_of(run, world, rank)
    torch.testing.assert_close(loss_in_chunks, loss, rtol=1e-12, atol=0)
    assert plain.keys() == in_chunks.keys() and (plain or run.parallel.pp > 1)
    return ", ".join(name for name in plain if not torch.allclose(in_chunks[name], plain[name], rtol=1e-9, atol=1e-14))


@pytest.mark.parametrize("name", slow_except(list(RUNS), "uneven", "latent attention"))
def test_losses_and_gradients_are_those_of_the_plain_twin(name: str) -> None:
    world, run = RUNS[name]
    assert not problems(run, world)
    assert spawn_ranks(partial(compare, world, run), world) == [""] * world


def feed_forward(rank: int, stream: ThreadCommStream) -> tuple[FeedForward, ChunkedTokenShards, Batch]:
    groups = Groups(fold(TWO, 2), rank, Ledger(), timedelta(seconds=60), beside_tp=True)
    tokens = ChunkedTokenShards(groups, None, None, 2, stream)
    layer = FeedForward(4, 6, "swiglu", tokens, ParameterMatmul()).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(rank))
    ids = torch.zeros(8, dtype=torch.int64)
    return layer, tokens, whole_batch(ids, ids, (8,), step_labels=8, step_tokens=8)


def observed(rank: int) -> list[str]:
    log: list[str] = []
    layer, _, batch = feed_forward(rank, Watched(log))
    hidden = layer._hidden

    def multiply(x_SD: Tensor) -> Tensor:
        log.append("matmuls")
        out = hidden(x_SD)
        out.register_hook(lambda _: log.append("matmuls backward"))
        return out

    layer._hidden = multiply  # type: ignore[method-assign]
    x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    y = layer(x, batch)
    log.append("backward")
    y.sum().backward()
    return log


def test_exchanges_of_a_chunk_are_under_way_while_another_is_multiplied() -> None:
    forward = ["submit", "submit", "wait", "matmuls", "submit", "wait", "matmuls", "submit", "wait", "wait"]
    backward = [step.replace("matmuls", "matmuls backward") for step in forward]
    assert spawn_ranks(observed, 2) == [[*forward, "backward", *backward]] * 2


def held_until_the_other_is_multiplied(rank: int) -> list[bool]:
    """A chunk's gather does not end before the matmuls of the chunk before it have begun."""
    layer, tokens, batch = feed_forward(rank, ThreadCommStream())
    hidden, gather, begun = layer._hidden, tokens._gather_one, [threading.Event() for _ in range(2)]
    calls, held = iter(begun), iter((None, begun[0]))
    was_beside = []

    def multiply(x_SD: Tensor) -> Tensor:
        next(calls).set()
        return hidden(x_SD)

    def wait(sizes: tuple[int, ...], x_cX: Tensor) -> Tensor:
        if (event := next(held)) is not None:
            was_beside.append(event.wait(60))
        return gather(sizes, x_cX)

    layer._hidden, tokens._gather_one = multiply, wait  # type: ignore[method-assign]
    layer(torch.ones(4, 4, dtype=torch.float64), batch)
    return was_beside


def test_a_gather_runs_while_the_chunk_before_it_is_multiplied() -> None:
    """In one thread this would wait until its time is over."""
    assert spawn_ranks(held_until_the_other_is_multiplied, 2) == [[True]] * 2


def chunks_and_back(rank: int) -> list[bool]:
    groups = Groups(fold(FOUR, 4), rank, Ledger(), timedelta(seconds=60), beside_tp=True)
    tokens = ChunkedTokenShards(groups, None, None, 3, ThreadCommStream())
    same = []
    for count in (0, 1, 3, 4, 7, 12, 23):
        x = torch.arange(2 * count).view(count, 2)
        chunks = tokens.split_chunks(x)
        sizes = tokens.chunk_sizes(count)
        same.append(
            torch.equal(tokens.join_chunks(chunks), x) and [len(chunk) for chunk in chunks] == list(map(sum, sizes))
        )
    return same


def test_chunks_are_put_together_in_the_order_of_tokens() -> None:
    assert spawn_ranks(chunks_and_back, 4) == [[True] * 7] * 4
