"""How much faster training is when short documents are packed and not padded: real tokens per second, one process.

Run it alone, on a machine with nothing else to do, to see the figures:

    OMP_NUM_THREADS=1 python -m pytest tests/train/test_packed_speed.py -s -q

Both ways train the same model on the same documents, step by step in turns, so whatever else the machine does slows
both. Reading, planning, forward, backward and update are all inside the measured time.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tests.data.token_files import megatron

from moefold.comm.process_groups import Groups, Ledger
from moefold.config.attention import GQAConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig
from moefold.config.run import RunConfig
from moefold.data.samples import AnySamples, open_samples
from moefold.parallel.parallelize import LocalModel, build_local_model
from moefold.pipeline.step import make_optimizer, run_step
from moefold.topology.folded_layout import fold
from moefold.train.batches import step_batches

S, BATCH, ROUNDS, VOCAB = 512, 16, 7, 512
# Of the natural logarithm of a document's length: half have fewer than 100 tokens, one in twenty more than 500.
MIDDLE, SPREAD = 4.6, 1.0
MODEL = ModelConfig(
    vocab_size=VOCAB,
    dim=128,
    num_layers=4,
    num_dense_layers=1,
    dense_hidden_dim=256,
    attention=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=32),
    moe=MoEConfig(num_experts=8, top_k=2, expert_hidden_dim=128, balance=BalanceConfig(sequence=0.01, z=1e-3)),
)


class Splits(NamedTuple):
    """One of the two ways to train, with a model and an optimizer of its own."""

    local_model: LocalModel
    optimizer: torch.optim.Optimizer
    samples: AnySamples


class Measured(NamedTuple):
    loss: float
    tokens: int
    computed: int
    seconds: float


def way(path: str, documents: str) -> Splits:
    data = DataConfig(S, BATCH, 4, documents, train=path, validation=None)  # type: ignore[arg-type]
    run = RunConfig(name="speed", model=MODEL, data=data)
    run = replace(run, optim=replace(run.optim, lr=1e-4))
    groups = Groups(fold(run.parallel, 1), 0, Ledger(), timedelta(seconds=120))
    local_model = build_local_model(run, groups, torch.device("cpu"))
    optimizer = make_optimizer(local_model)
    return Splits(local_model, optimizer, open_samples(run.data, VOCAB, run.seed))


def step(of: Splits, number: int) -> Measured:
    run, began = of.local_model.run, time.perf_counter()
    data = step_batches(of.samples, number * BATCH, run, of.local_model.groups, torch.device("cpu"))
    result = run_step(of.local_model, of.optimizer, data.batches)
    seconds = time.perf_counter() - began
    return Measured(float(result.sums.loss), data.tokens, sum(b.num_tokens for b in data.batches), seconds)


@pytest.mark.timing
@pytest.mark.slow
def test_packed_documents_train_faster_than_padded_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.lognormal(MIDDLE, SPREAD, 1000), 2).astype(int)
    path = megatron(tmp_path / "tail", [rng.integers(1, VOCAB, length) for length in lengths])
    ways = {kind: way(path, kind) for kind in ("padded", "bin_packed")}
    steps = {kind: [step(of, 0)] for kind, of in ways.items()}
    for number in range(1, ROUNDS + 1):
        for kind in ways:
            steps[kind].append(step(ways[kind], number))
    for a, b in zip(steps["padded"], steps["bin_packed"]):
        assert a.tokens == b.tokens
    # The first step from equal weights is equal up to rounding; each update then rounds a little differently.
    assert steps["bin_packed"][0].loss == pytest.approx(steps["padded"][0].loss, rel=1e-6)
    drift = max(abs(a.loss - b.loss) for a, b in zip(steps["padded"], steps["bin_packed"]))
    assert drift < 1e-4
    speed = {kind: median(m.tokens / m.seconds for m in found[1:]) for kind, found in steps.items()}
    ratio = median(a.seconds / b.seconds for a, b in zip(steps["padded"][1:], steps["bin_packed"][1:]))
    padded, packed = (sum(m.computed for m in steps[kind]) for kind in ("padded", "bin_packed"))
    print(
        f"\npadded {speed['padded']:,.0f}, packed {speed['bin_packed']:,.0f} real tokens/s: {ratio:.2f}x "
        f"({packed / padded:.0%} of the padded tokens are real; losses differ by at most {drift:.1e})"
    )
    assert ratio >= 1.5
