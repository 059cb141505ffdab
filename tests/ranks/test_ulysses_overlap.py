"""All-to-alls of heads in chunks of tokens: values of the plain twin, in the planned order, with real concurrency."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
from tests.marks import slow_except
from tests.ranks.test_shared_beside import Watched
from tests.ranks.test_tp_overlap import GATED, MLA, gradients_of, retained, run_config
from torch import Tensor

from moefold.attention.gqa import GroupedQueryAttention
from moefold.checks.run_all import problems
from moefold.comm.p2p import ThreadCommStream
from moefold.comm.process_groups import Groups, Ledger
from moefold.comm.spawn import spawn_ranks
from moefold.config.attention import GQAConfig, RopeConfig
from moefold.config.model import LoraConfig
from moefold.config.parallel import ContextConfig, Overlap, ParallelConfig
from moefold.config.run import RunConfig
from moefold.moe.exchange_beside import ExchangesBeside
from moefold.nn.batch import Batch, context_shard, whole_batch
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.nn.parallel_interfaces import LocalTokens
from moefold.parallel.context_parallel import ChunkedUlyssesCore
from moefold.parallel.ulysses import HeadAllToAll, UlyssesChunks, chunk_order, document_order, tokens_per_rank
from moefold.topology.folded_layout import chunk_sizes, fold

ULYSSES: tuple[Overlap, ...] = ("ulysses",)
HEADS = ContextConfig(full="all_to_all", windowed="all_to_all")
TWO, FOUR = (ParallelConfig(cp=cp, context=HEADS, overlap=ULYSSES) for cp in (2, 4))
WINDOW = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8, window=5)
# The world's size, and the run.
RUNS: dict[str, tuple[int, RunConfig]] = {
    "two ranks": (2, run_config(TWO)),
    "four ranks, four chunks": (4, run_config(replace(FOUR, ulysses_chunks=4, ep=2))),
    # 23 tokens on four ranks, chunks of 2 and 1.
    "uneven": (4, run_config(replace(FOUR, ulysses_chunks=4), seq_len=23)),
    "more chunks than tokens": (4, run_config(replace(FOUR, ulysses_chunks=9), seq_len=6)),
    "fewer tokens than ranks": (4, run_config(replace(FOUR, ulysses_chunks=3), seq_len=3)),
    "fewer key heads than ranks": (4, run_config(FOUR, attention=replace(WINDOW, window=None))),
    "latent attention": (2, run_config(replace(TWO, ulysses_chunks=3), 23, attention=MLA)),
    "latent attention, no query latent": (2, run_config(TWO, 23, attention=replace(MLA, q_latent=None))),
    "gate, biases and sinks": (2, run_config(TWO, 23, attention=GATED)),
    "window, a ring for full attention": (
        2,
        run_config(replace(TWO, context=ContextConfig(full="ring", windowed="all_to_all")), 23, attention=WINDOW),
    ),
    "norms over all heads": (2, run_config(TWO, attention=replace(GATED, output_gate=False, qk_norm="full"))),
    "tensor parallel": (4, run_config(replace(TWO, tp=2, etp=1), 23)),
    "tensor parallel in chunks": (4, run_config(replace(TWO, tp=2, etp=1, overlap=("tensor_parallel", "ulysses")))),
    "flat": (4, run_config(replace(TWO, sharding="flat"))),
    "deferred weight gradients": (2, run_config(replace(TWO, schedule="zb_h1"))),
    "pairs": (4, run_config(replace(TWO, ep=2, schedule="1f1b_overlapped"))),
    "pipeline": (4, run_config(replace(TWO, pp=2, ep=2, schedule="zb_v", vpp=2), num_layers=4)),
    "shared expert beside": (4, run_config(replace(TWO, ep=4, overlap=("shared_experts", *ULYSSES)))),
    "discarded": (2, retained(run_config(TWO), dense="discard", shared="discard", attention_norm="discard")),
    "adapters": (2, run_config(TWO, lora=LoraConfig(rank=2, targets=("*",)))),
}


def compare(world: int, run: RunConfig, rank: int) -> str:
    rest = tuple(name for name in run.parallel.overlap if name != "ulysses")
    plain_run = replace(run, parallel=replace(run.parallel, overlap=rest, ulysses_chunks=2))
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


def attention_layer(rank: int, stream: ThreadCommStream) -> tuple[GroupedQueryAttention, Batch]:
    groups = Groups(fold(TWO, 2), rank, Ledger(), timedelta(seconds=60), beside_contexts=True)
    chunks = UlyssesChunks(groups.beside_contexts, 2, ExchangesBeside(stream))
    core = ChunkedUlyssesCore(groups.contexts, chunks)
    config = GQAConfig(num_heads=2, num_kv_heads=2, head_dim=4)
    layer = GroupedQueryAttention(config, RopeConfig(), 4, 0, 1e-6, LocalTokens(), core, ParameterMatmul()).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    ids = torch.zeros(8, dtype=torch.int64)
    batch = whole_batch(ids, ids, (8,), step_labels=8, step_tokens=8, context_size=2)
    return layer, context_shard(batch, rank)


def observed(rank: int) -> list[str]:
    log: list[str] = []
    layer, batch = attention_layer(rank, Watched(log))
    projected, out = layer._projected, layer.out.partial

    def project(x_SD: Tensor) -> tuple[Tensor, ...]:
        log.append("qkv")
        made = projected(x_SD)
        made[0].register_hook(lambda _: log.append("qkv backward"))
        return made

    def back(x_SX: Tensor) -> Tensor:
        log.append("out")
        made = out(x_SX)
        made.register_hook(lambda _: log.append("out backward"))
        return made

    layer._projected, layer.out.partial = project, back  # type: ignore[method-assign]
    x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    y = layer(x, batch)
    log.append("backward")
    y.sum().backward()
    return log


def test_exchanges_of_a_chunk_are_under_way_while_another_is_multiplied() -> None:
    into = ["qkv", "submit", "qkv", "submit", "wait", "wait"]
    home = ["submit", "submit", "wait", "out", "wait", "out"]
    out = ["out backward", "submit", "out backward", "submit", "wait", "wait"]
    first = ["submit", "submit", "wait", "qkv backward", "wait", "qkv backward"]
    assert spawn_ranks(observed, 2) == [[*into, *home, "backward", *out, *first]] * 2


def held_until_the_other_is_projected(rank: int) -> list[bool]:
    """The all-to-all of the first chunk does not end before the projections of the second have begun."""
    layer, batch = attention_layer(rank, ThreadCommStream())
    projected, travel, begun = layer._projected, HeadAllToAll.tokens_to_heads, [threading.Event() for _ in range(2)]
    calls, held = iter(begun), iter((begun[1], None))
    was_beside = []

    def project(x_SD: Tensor) -> tuple[Tensor, ...]:
        next(calls).set()
        return projected(x_SD)

    def wait(self: HeadAllToAll, *qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if (event := next(held)) is not None:
            was_beside.append(event.wait(60))
        return travel(self, *qkv)

    layer._projected, HeadAllToAll.tokens_to_heads = project, wait  # type: ignore[method-assign]
    layer(torch.ones(4, 4, dtype=torch.float64), batch)
    return was_beside


def test_an_exchange_runs_while_the_next_chunk_is_projected() -> None:
    """In one thread this would wait until its time is over."""
    assert spawn_ranks(held_until_the_other_is_projected, 2) == [[True]] * 2


@pytest.mark.parametrize("lengths", [(8,), (23,), (3, 1, 9), (1,)])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("chunks", [1, 3, 9])
def test_rows_ordered_by_chunk_come_into_document_order(lengths: tuple[int, ...], size: int, chunks: int) -> None:
    """Each rank's tokens, cut into chunks; all ranks' first chunks are there first."""
    tokens = tokens_per_rank(lengths, 0, size, size)
    place_by_rank = document_order(lengths, 0, size, size).argsort().split(list(tokens))
    parts = [
        place.split(list(sizes))
        for place, sizes in zip(place_by_rank, zip(*chunk_sizes(tokens, chunks), strict=True), strict=True)
    ]
    arrived = torch.cat([part for of_chunk in zip(*parts, strict=True) for part in of_chunk])
    assert arrived[chunk_order(lengths, size, chunks)].tolist() == list(range(sum(lengths)))
