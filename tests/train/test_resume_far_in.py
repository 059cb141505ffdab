"""Going on at step 1,000,000 of a trillion-token mixture costs what going on at step 1 costs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.data.test_data_samples import huge
from tests.kill import Diary

from moefold.config.data import SourceConfig
from moefold.recipes.catalog import RECIPES
from moefold.train.saving import begin_save
from moefold.train.state import TrainState
from moefold.train.train_context import build_train_context
from moefold.train.train_loop import train


@pytest.mark.timing
def test_a_run_resumes_a_million_steps_in_within_seconds(tmp_path: Path) -> None:
    try:
        sources = tuple(
            SourceConfig(path=huge(tmp_path / name, documents, tokens), weight=weight)
            for name, documents, tokens, weight in (("web", 1_000_000, 900_000, 0.8), ("code", 100, 1_500_000_000, 0.2))
        )
    except OSError as error:
        pytest.skip(f"no sparse files of this size here: {error}")
    torch.set_num_threads(1)
    base, far = RECIPES["debug_tiny"](), 1_000_000
    data = replace(base.data, mixture=sources, validation=None)
    settings = replace(base.train, steps=far + 1, directory=str(tmp_path / "runs"))
    run = replace(base, data=data, train=settings)
    context, _ = build_train_context(run, 0, 1, torch.device("cpu"), 30.0)
    begin_save(context, TrainState(step=far, samples=far * data.global_batch))
    assert context.saver.finish() == far

    began = time.perf_counter()
    context, state = build_train_context(run, 0, 1, torch.device("cpu"), 30.0)
    assert state.step == far and context.samples.num_tokens > 10**12
    assert train(context, state, [Diary(tmp_path / "diary.jsonl")]) == 0
    seconds = time.perf_counter() - began
    print(f"resumed, stepped and saved in {seconds:.2f} s")
    assert seconds < 5
