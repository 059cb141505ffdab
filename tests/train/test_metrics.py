"""Speeds and routing figures from records, with the numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.run_records import info_of, record_of

from moefold.blueprint.flops import training_flops_per_token
from moefold.train.metrics import Meter, router_stats


def test_speed_of_an_interval() -> None:
    info = info_of(Path("nowhere"))
    meter = Meter(info, "CPU")
    slow = record_of(2, seconds={"data": 0.25, "step": 0.04, "save": 0.01, "total": 0.3})
    speed = meter.speed([record_of(1), slow])
    assert speed.tokens_per_s == pytest.approx(1024 / 0.4)
    per_token = training_flops_per_token(info.run.model, info.run.data.seq_len)
    assert speed.tflops == pytest.approx(1024 / 0.4 * per_token / 4 / 1e12)
    assert speed.data_wait == pytest.approx(0.26 / 0.4)
    assert speed.save_wait == pytest.approx(0.01 / 0.4)
    assert speed.step_seconds == pytest.approx(0.2)


def test_mfu_only_where_the_peak_is_known() -> None:
    info = info_of(Path("nowhere"))
    assert Meter(info, "CPU").speed([record_of(1)]).mfu is None
    assert Meter(info, "CPU").mfu_note.startswith(
        "mfu: none on a CPU, whose peak is in no table; `moefold bench calibrate`"
    )
    assert "computes in float32" in Meter(info, "NVIDIA H100 80GB HBM3").mfu_note
    narrow = Meter(info, "CPU")
    narrow.peak = 1e12
    speed = narrow.speed([record_of(1)])
    assert speed.mfu == pytest.approx(speed.tflops)


def test_the_time_left_forgets_the_first_step() -> None:
    meter = Meter(info_of(Path("nowhere")), "CPU")
    assert meter.eta(record_of(1, seconds={"total": 60.0})) == pytest.approx(19 * 60)
    assert meter.eta(record_of(2, seconds={"total": 1.0})) == pytest.approx(18)
    assert meter.eta(record_of(20, seconds={"total": 1.0})) == 0


def test_no_time_and_no_steps_are_no_speed() -> None:
    meter = Meter(info_of(Path("nowhere")), "CPU")
    assert meter.speed([]).tokens_per_s == 0
    assert meter.speed([record_of(1, seconds={"total": 0.0})]).step_seconds == 0


def test_router_stats_by_hand() -> None:
    stats = router_stats([[4, 4, 4, 4], [8, 4, 4, 0]])
    even, skewed = stats.layers
    assert (even.max_load, even.min_load, even.cv, even.dead) == (1, 1, 0, ())
    assert even.entropy == pytest.approx(1)
    assert (skewed.max_load, skewed.min_load, skewed.dead, skewed.tokens) == (2, 0, (3,), 16)
    assert skewed.entropy == pytest.approx(1.5 * math.log(2) / math.log(4))
    assert skewed.cv == pytest.approx(math.sqrt(0.5))
    assert (stats.max_load, stats.mean_max_load, stats.dead) == (2, 1.5, 1)
    assert stats.entropy == skewed.entropy


def test_router_stats_of_nothing() -> None:
    assert router_stats([]).max_load == 0
    silent = router_stats([[0, 0]]).layers[0]
    assert (silent.max_load, silent.entropy, silent.dead) == (0, 0, ())
    assert router_stats([[7]]).layers[0].entropy == 0
