"""Overlap is real: on a slow link between two hosts, all-to-alls are hidden by another microbatch's compute.

Two network namespaces with two ranks each, experts spread over all four, so that half of every dispatch and combine
crosses the link. What counts as exposed is the time in which a rank waits for an exchange and computes nothing.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from tests.two_hosts import move_to, possible, two_hosts

import moefold.comm.p2p
from moefold.comm import collectives as exchange
from moefold.comm.spawn import spawn_ranks
from moefold.config.attention import GQAConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import KernelsConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch import all_to_all
from moefold.nn.batch import whole_batch
from moefold.parallel.parallelize import build_local_model, groups_of
from moefold.pipeline.runtime import run_schedule

MICROBATCHES, TOKENS, WIDTH = 12, 512, 512
STEPS = 3
PLAIN, OVERLAPPED = "zb_h1", "1f1b_overlapped"


def run_config(schedule: str) -> RunConfig:
    return RunConfig(
        seed=1,
        model=ModelConfig(
            vocab_size=256,
            dim=WIDTH,
            num_layers=2,
            attention=GQAConfig(num_heads=8, num_kv_heads=8, head_dim=64),
            moe=MoEConfig(num_experts=8, top_k=2, expert_hidden_dim=768, router=RouterConfig(kind="balanced")),
        ),
        parallel=ParallelConfig(ep=4, schedule=schedule),
        data=DataConfig(seq_len=TOKENS, global_batch=4 * MICROBATCHES),
        kernels=KernelsConfig(experts="sequential"),
    )


class Exposed:
    """Adds up the time that the main thread spends waiting for exchanges."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **words: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **words)
            finally:
                self.seconds += time.perf_counter() - began

        return timed_call


def measure(schedule: str, rank: int) -> dict[str, Any]:
    """Median step time and exposed share of it, and what tells whether gradients are equal."""
    run, exposed = run_config(schedule), Exposed()
    main = threading.get_ident()
    move, counts = exchange._all_to_all, exchange.all_to_all_counts

    def only_on_main(call: Callable[..., Any]) -> Callable[..., Any]:
        timed = exposed.timed(call)
        return lambda *args, **words: (timed if threading.get_ident() == main else call)(*args, **words)

    exchange._all_to_all = only_on_main(move)
    all_to_all.all_to_all_counts = only_on_main(counts)

    def wait(self: Any, future: Any, meanwhile: Callable[[], bool]) -> Any:
        while not future.done() and meanwhile():
            pass
        return exposed.timed(future.result)()

    moefold.comm.p2p.ThreadCommStream.wait = wait  # type: ignore[method-assign]
    local_model = build_local_model(run, groups_of(run, 4, rank, timedelta(seconds=120)), torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(MICROBATCHES):
        hidden = torch.randint(256, (TOKENS + 1,), generator=generator)
        count = 4 * MICROBATCHES * TOKENS
        batches.append(whole_batch(hidden[:-1], hidden[1:], (TOKENS,), step_labels=count, step_tokens=count))
    steps, waits = [], []
    gradients: dict[str, torch.Tensor] = {}
    local_model.sharding.start_step()
    for _ in range(STEPS):
        local_model.model.zero_grad()
        torch.distributed.barrier()
        exposed.seconds, began = 0.0, time.perf_counter()
        sums = run_schedule(local_model, batches)
        steps.append(time.perf_counter() - began)
        waits.append(exposed.seconds)
        gradients = {n: p.grad for n, p in local_model.model.named_parameters() if ".experts." in n}
    grad_norm = sum(float(g.detach().double().square().sum()) for g in gradients.values())
    ratio = [wait / step for wait, step in zip(waits, steps, strict=True)]
    return {
        "step": statistics.median(steps),
        "exposed": statistics.median(ratio),
        "loss": float(sums.loss),
        "grad_norm": grad_norm,
    }


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not possible(), reason="needs the right to make network namespaces")
def test_all_to_alls_are_hidden_by_compute() -> None:
    found = {}
    # Both gather parameters once per step, so that exchanges with experts are all that crosses the link inside it.
    for schedule in (PLAIN, OVERLAPPED):
        with two_hosts("375mbit"):
            work = partial(measure, schedule)
            answers = spawn_ranks(work, 4, seconds=600, interface=lambda rank: move_to(rank // 2))
        found[schedule] = answers
        print(schedule, [{k: round(v, 5) for k, v in answer.items()} for answer in answers])
    for plain, overlapped in zip(found[PLAIN], found[OVERLAPPED], strict=True):
        assert overlapped["loss"] == pytest.approx(plain["loss"], rel=1e-6)
        assert overlapped["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
    assert min(answer["exposed"] for answer in found[PLAIN]) >= 0.30
    assert max(answer["exposed"] for answer in found[OVERLAPPED]) <= 0.08
