"""How much faster documents of very different lengths train when each wave chooses by how many ranks they are shared.

Run it alone, on a machine with nothing else to do, to see the figures:

    OMP_NUM_THREADS=1 python -m pytest tests/train/test_dynamic_speed.py -s -q

Four processes train the same model twice on the same documents, step by step in turns: with the context size that the
longest document needs, and with one that every wave chooses. Either way a rank holds about S/4 tokens at most. Reading,
planning, forward, backward and update are inside the measured time, which ends when the slowest rank is done. The
processor time of all ranks is measured too: others who use the machine move it far less than the clock.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.data.token_files import megatron

from moefold.comm.spawn import spawn_ranks
from moefold.config.attention import GQAConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.data.samples import AnySamples, open_samples
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.pipeline.step import make_optimizer, run_step
from moefold.train.batches import step_batches

RANKS, S, ROUNDS, VOCAB = 4, 4096, 9, 512
CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=VOCAB,
    dim=128,
    num_layers=2,
    num_dense_layers=1,
    dense_hidden_dim=256,
    attention=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=32),
    moe=MoEConfig(num_experts=8, top_k=2, expert_hidden_dim=128, balance=BalanceConfig(sequence=0.01, z=1e-3)),
)
PARALLEL = {
    "static": ParallelConfig(cp=RANKS, ep=RANKS),
    "dynamic": ParallelConfig(cp=RANKS, ep=RANKS, dynamic_cp=True),
}


class Splits(NamedTuple):
    """One of the two ways to train, with a model and an optimizer of its own."""

    local_model: LocalModel
    optimizer: torch.optim.Optimizer
    samples: AnySamples


class Measured(NamedTuple):
    """A step as one rank saw it; JSON makes it a list on its way home."""

    loss: float
    tokens: int
    seconds: float
    processor: float
    messages: int
    bytes_sent: int
    contexts: list[int]


def way(path: str, batch: int, parallel: ParallelConfig, rank: int) -> Splits:
    data = DataConfig(S, batch, 1, "bin_packed", train=path, validation=None)
    run = RunConfig(name="speed", model=MODEL, data=data, parallel=parallel)
    local_model = build_local_model(run, groups_of(run, RANKS, rank, timedelta(seconds=300)), CPU)
    optimizer = make_optimizer(local_model)
    return Splits(local_model, optimizer, open_samples(run.data, VOCAB, run.seed))


def step(of: Splits, number: int) -> Measured:
    groups = of.local_model.groups
    before = sent_around(of)
    dist.barrier()
    began, spent = time.perf_counter(), time.process_time()
    data = step_batches(of.samples, number * of.local_model.run.data.global_batch, of.local_model.run, groups, CPU)
    result = run_step(of.local_model, of.optimizer, data.batches)
    dist.barrier()
    seconds, processor = time.perf_counter() - began, time.process_time() - spent
    messages, num_bytes = (now - then for now, then in zip(sent_around(of), before))
    contexts = [batch.context_size for batch in data.batches]
    return Measured(float(result.sums.loss), data.tokens, seconds, processor, messages, num_bytes, contexts)


def sent_around(of: Splits) -> tuple[int, int]:
    """Messages and bytes of this rank in all its rings so far."""
    found = [group.ledger.of("send", group.name) for group in of.local_model.groups.contexts.values()]
    return sum(traffic.calls for traffic in found), sum(traffic.bytes_sent for traffic in found)


def both_ways(path: str, batch: int) -> list[dict[str, list[Measured]]]:
    """Of every rank, the steps of both ways; the first of each is not to be timed."""

    def work(rank: int) -> dict[str, list[Measured]]:
        ways = {kind: way(path, batch, parallel, rank) for kind, parallel in PARALLEL.items()}
        steps: dict[str, list[Measured]] = {kind: [] for kind in ways}
        for number in range(ROUNDS + 1):
            # Whoever goes first finds the caches as the other left them, so they take turns at that, too.
            for kind in list(ways)[:: 1 if number % 2 else -1]:
                steps[kind].append(step(ways[kind], number))
        return steps

    answers = spawn_ranks(work, RANKS, seconds=900)
    return [{kind: [Measured(*m) for m in found] for kind, found in answer.items()} for answer in answers]


def lognormal(middle: float, spread: float) -> np.ndarray:
    """Lengths whose natural logarithm has this middle and spread; longer ones are cut at S."""
    draws = np.random.default_rng(0).lognormal(middle, spread, 1000)
    return np.clip(draws, 2, S).astype(int)


def uniform() -> np.ndarray:
    return np.random.default_rng(0).integers(2, S, 1000, endpoint=True)


@pytest.mark.timing
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "name,lengths,batch,needed",
    [
        # Half have fewer than 300 tokens, one in seven does not fit on one rank, one in seventy is as long as S.
        pytest.param("median 300", lognormal(5.7, 1.2), 32, 1.2, marks=pytest.mark.slow),
        pytest.param("median 100", lognormal(4.6, 1.5), 64, 1.2, marks=pytest.mark.nightly),
        # Three of four need two ranks or four, whoever chooses: nothing to gain, and nothing much to lose.
        pytest.param("uniform", uniform(), 8, 0.85, marks=pytest.mark.nightly),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dynamic_sizes_train_faster_than_one_size(
    tmp_path: Path, name: str, lengths: np.ndarray, batch: int, needed: float
) -> None:
    rng = np.random.default_rng(1)
    path = megatron(tmp_path / "tail", [rng.integers(1, VOCAB, length + 1) for length in lengths])
    ranks = both_ways(path, batch)
    static, dynamic = (ranks[0][kind] for kind in PARALLEL)
    for a, b in zip(static, dynamic):
        assert a.tokens == b.tokens
        assert set(a.contexts) == {RANKS}
    # The first step from equal weights is equal up to rounding; each update then rounds a little differently.
    assert dynamic[0].loss == pytest.approx(static[0].loss, rel=1e-6)
    drift = max(abs(a.loss - b.loss) for a, b in zip(static, dynamic))
    assert drift < 1e-4
    by_clock = [a.seconds / b.seconds for a, b in zip(static[1:], dynamic[1:])]
    processor = {
        kind: [sum(rank[kind][number].processor for rank in ranks) for number in range(1, ROUNDS + 1)]
        for kind in PARALLEL
    }
    by_processor = [a / b for a, b in zip(processor["static"], processor["dynamic"])]
    told = []
    for kind, found in (("static", static), ("dynamic", dynamic)):
        speed = median(m.tokens / m.seconds for m in found[1:])
        waves, messages, megabytes = (
            np.mean([count(m) for m in found])
            for count in (lambda m: len(m.contexts), lambda m: m.messages, lambda m: m.bytes_sent / 1e6)
        )
        told.append(
            f"{kind:8}{speed:8,.0f} real tokens/s by the clock, {median(processor[kind]):5.2f} s of processor time, "
            f"{waves:.1f} waves, {messages:4.0f} messages of rank 0, {megabytes:5.1f} MB"
        )
    told.append(
        f"{median(by_clock):.2f}x by the clock ({min(by_clock):.2f} to {max(by_clock):.2f}), "
        f"{median(by_processor):.2f}x by processor time ({min(by_processor):.2f} to {max(by_processor):.2f}); "
        f"losses differ by at most {drift:.1e}"
    )
    print("", f"{name}:", *told, f"sizes of the last step: {dynamic[-1].contexts}", sep="\n")
    assert median(by_processor) >= needed
    assert median(by_clock) >= (1.0 if needed > 1 else 0.7)
