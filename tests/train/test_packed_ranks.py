"""Documents on real ranks: whatever a sample is, three steps on any layout are the three steps of one process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.marks import slow_except
from tests.train.test_packed import BATCH, run_of

from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ContextConfig, ParallelConfig
from moefold.config.run import RunConfig
from moefold.data.samples import open_samples
from moefold.parallel.parallelize import build_local_model, groups_of
from moefold.pipeline.step import evaluate, make_optimizer, run_step
from moefold.prove.proof_inputs import proof_init
from moefold.train.batches import step_batches

CPU = torch.device("cpu")
LAYOUTS = {
    "dp2": (2, ParallelConfig()),
    "tp2 ep2": (2, ParallelConfig(tp=2, ep=2)),
    "cp2 dp2 ep4": (4, ParallelConfig(cp=2, ep=4)),
    "cp2 by heads": (2, ParallelConfig(cp=2, context=ContextConfig(full="all_to_all"))),
    "pp2 dp2": (4, ParallelConfig(pp=2, ep=2)),
    "pp2 zb_v": (2, ParallelConfig(pp=2, vpp=2, schedule="zb_v")),
    "dynamic": (4, ParallelConfig(cp=2, ep=2, dynamic_cp=True)),
    "dynamic pp2": (4, ParallelConfig(pp=2, ep=2, dynamic_cp=True)),
}


def steps_of(run: RunConfig, world: int) -> list[list[list[float]]]:
    """Of every rank and step: loss, look-ahead loss, norm, balance losses and the tokens per expert."""

    def work(rank: int) -> list[list[float]]:
        local_model = build_local_model(run, groups_of(run, world, rank, timedelta(seconds=120)), CPU, proof_init)
        optimizer = make_optimizer(local_model)
        samples, told = open_samples(run.data, run.model.vocab_size, run.seed), []
        for number in range(3):
            data = step_batches(samples, number * BATCH, run, local_model.groups, CPU)
            result = run_step(local_model, optimizer, data.batches)
            sums = result.sums
            counts = sums.counts_ME.flatten().tolist()
            told.append(
                [float(sums.loss), float(sums.mtp_loss), float(result.grad_norm), *map(float, sums.balance), *counts]
            )
        last = step_batches(samples, 3 * BATCH, run, local_model.groups, CPU)
        return [*told, [float(evaluate(local_model, last.batches)), float(last.tokens)]]

    return spawn_ranks(work, world, seconds=300)


# Packed documents have shapes that change with every microbatch; the others a fixed one, or one that windows decide.
CASES = [("bin_packed", layout) for layout in LAYOUTS]
CASES += [(kind, layout) for kind in ("padded", "concat_masked") for layout in ("tp2 ep2", "cp2 dp2 ep4", "pp2 dp2")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[float]]]:
    """The steps of one process, for each kind of sample once."""

    @cache
    def of(kind: str) -> list[list[float]]:
        (steps,) = steps_of(run_of(tmp_path_factory.mktemp(kind), kind), 1)
        return steps

    return of


@pytest.mark.parametrize("kind,layout", slow_except(CASES, ("bin_packed", "dynamic pp2"), ("concat_masked", "pp2 dp2")))
def test_any_layout_trains_as_one_process(
    tmp_path: Path, kind: str, layout: str, alone: Callable[[str], list[list[float]]]
) -> None:
    world, parallel = LAYOUTS[layout]
    for found in steps_of(run_of(tmp_path, kind, parallel), world):
        for step, expected in zip(found, alone(kind), strict=True):
            assert step == pytest.approx(expected, rel=1e-9, abs=1e-12)
