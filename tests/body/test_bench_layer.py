"""Contests: what is made of their runs, that contestants compute the same, and tiny contests from end to end."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tests.pages import assert_whole

from moefold.bench import attentions
from moefold.bench.attention_shapes import AttentionShape
from moefold.bench.comparison import hold_contest
from moefold.bench.comparison_report import contest_json, contest_text
from moefold.bench.layer_shapes import SHAPES, LayerShape
from moefold.bench.layers import BARE, CONTESTANTS, OURS
from moefold.bench.machine_load import cores_of_others, now
from moefold.bench.process_memory import measured_peak
from moefold.bench.results import CHANGING, FIXED, Contest, Entrant, Run, Standing, spread
from moefold.bench.runner import Checked, Options
from moefold.bench.saved_bytes import saved_for_backward
from moefold.bench.targets import AS_LAUNCHED, BEST_PEER, SAME, Goal, verdicts
from moefold.cli.main import main
from moefold.parallel.expert_parallel import DISPATCHERS

TINY = LayerShape(tokens=64, dim=32, hidden=16, experts=4, top_k=2, shared=16)
SIZES = ["--tokens", "64", "--dim", "32", "--hidden", "16", "--experts", "4", "--top-k", "2", "--shared", "16"]


def options(dtype: str = "float32", **more: object) -> Options:
    return {"shape": asdict(TINY), "dtype": dtype, "threads": 1, "allocator": "default"} | more


def standing(name: str, role: str, seconds: list[float], **more: object) -> Standing:
    runs = tuple(Run(wall=2 * taken, cpu=taken, faults=3) for taken in seconds)
    return Standing(Entrant(name, role, {"threads": 1}), {CHANGING: runs}, **more)  # type: ignore[arg-type]


def invented(rounds: int = 7, **more: object) -> Contest:
    """A machine that gets slower and slower, and one library that rounds too much."""
    drift = [1.0 + number for number in range(rounds)]
    standings = (
        standing("dense", "bare", drift),
        standing("ours", "ours", [1.5 * base for base in drift], saved=10, peak=50),
        standing("quick", "peer", [1.2 * base for base in drift], error=0.5, saved=5, peak=1),
        standing("slow", "peer", [3.0 * base for base in drift], error=1e-3, saved=20, peak=100),
        standing("absent", "peer", [], failure="ModuleNotFoundError: No module named 'absent'"),
    )
    return Contest("invented", "cpu", rounds, standings, tolerance=0.1, **more)  # type: ignore[arg-type]


# ---- what is made of runs ----


def test_ratios_are_taken_round_by_round() -> None:
    """The drift is sevenfold, and no ratio sees it."""
    ratio = invented().ratio("ours", "dense", CHANGING)
    assert ratio is not None and ratio.low == ratio.median == ratio.high == 1.5


def test_the_spread_is_the_middle_half() -> None:
    found = spread([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)


def test_a_peer_that_computes_something_else_is_not_the_best() -> None:
    assert invented().best_peer(CHANGING) == "slow"


def test_verdicts_follow_the_limits() -> None:
    goals = (
        Goal("ours", "time", "dense", 1.6, stretch=1.3),
        Goal("ours", "time", "dense", 1.4),
        Goal("ours", "time", BEST_PEER, 0.5, allocators=(AS_LAUNCHED,)),
        Goal("ours", "time", BEST_PEER, 0.1, allocators=(SAME,)),
        Goal("ours", "saved", "", 10),
        Goal("ours", "peak", BEST_PEER, 0.4),
        Goal("nobody", "time", "dense", 1.0),
    )
    found = verdicts(invented(), goals, AS_LAUNCHED)
    assert [each.reached for each in found] == [True, False, True, True, False, None]
    assert found[0].words.endswith("1.5x, reached (stretch 1.3x: missed)") and "MISSED" in found[1].words
    assert "(slow)" in found[2].words and "not measured" in found[-1].words


def test_few_rounds_give_no_verdict() -> None:
    found = verdicts(invented(rounds=3), [Goal("ours", "time", "dense", 1.6)], AS_LAUNCHED)
    assert found[0].reached is None and "needs 7" in found[0].words


def test_reports_name_who_is_absent_and_why() -> None:
    text = contest_text(invented(), ("dense",), [])
    assert "No module named 'absent'" in text and "too large" in text and "CPU time" in text
    told = contest_json(invented(), ("dense",), [])
    assert json.loads(json.dumps(told))["contestants"][1]["routings"][CHANGING]["ratios"]["dense"]["median"] == 1.5


# ---- contestants ----


@pytest.mark.parametrize("name", OURS)
def test_our_layer_computes_the_mixture(name: str) -> None:
    layer = CONTESTANTS[name](options())
    assert layer.relative_error(layer.prepare(3)) < 1e-5  # type: ignore[attr-defined]
    prepared = layer.prepare(3)
    layer.run(prepared)
    assert prepared.grad is not None
    assert (layer.saved_bytes(layer.prepare(3)) or 0) > 0


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bare_engines_multiply_as_much_as_the_shape_says(name: str, dtype: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    engine = CONTESTANTS[name](options(dtype))
    prepared = engine.prepare(0)
    with FlopCounterMode(display=False) as counted:
        engine.run(prepared)
    # torch's counter knows no grouped product.
    whole = TINY.flops() if name == "dense" else 3 * 6 * TINY.tokens * TINY.dim * TINY.shared
    assert counted.get_total_flops() == whole


def test_another_seed_is_another_routing() -> None:
    engine = CONTESTANTS["grouped_mm"](options())
    assert torch.equal(engine.prepare(1), engine.prepare(1))
    assert not torch.equal(engine.prepare(1), engine.prepare(2))
    assert engine.prepare(1)[-1] == TINY.rows


def test_transformers_layer_computes_the_mixture() -> None:
    pytest.importorskip("transformers")
    layer = CONTESTANTS["transformers grouped_mm"](options())
    assert layer.relative_error(layer.prepare(3)) < 1e-5  # type: ignore[attr-defined]


# ---- memory ----


def test_a_storage_is_saved_once_and_parameters_never() -> None:
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    # The product saves x and the weight, the sine its own input, twice.
    saved = saved_for_backward(lambda: _twice_sine(x @ weight), [weight])
    assert saved == 2 * 8 * 8 * 4


def _twice_sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + x.T.sin()


def test_the_peak_is_what_a_run_takes() -> None:
    before, peak = measured_peak(lambda: torch.ones(16 << 20, dtype=torch.uint8))
    if before is None or peak is None:
        pytest.skip("this kernel does not say")
    assert 15 << 20 < peak < 40 << 20


# ---- from end to end ----


def test_contestants_take_turns_and_failures_are_told() -> None:
    entrants = [
        Entrant("moefold sequential", "ours", options(allocator="kept")),
        Entrant("grouped_mm", "bare", options(dtype="float8")),
    ]
    said: list[str] = []
    contest = hold_contest(
        "layer", "tiny", entrants, rounds=2, warm=1, say=lambda what, done, total: said.append(f"{what} {done}")
    )
    ours, failed = contest.standings
    assert failed.failure == "KeyError: 'float8'" and not failed.runs[FIXED]
    assert len(ours.runs[FIXED]) == len(ours.runs[CHANGING]) == 2
    assert ours.saved and ours.error is not None and ours.error < 1e-5
    assert "changing routing, rounds 2" in said


def test_layer_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "layer.html"
    words = ["bench", "layer", *SIZES, "--contestants", "dense,moefold fused", "--routing", "changing"]
    assert main([*words, "--rounds", "2", "--warm", "1", "--json", "--out", str(page)]) == 0
    told = json.loads(capsys.readouterr().out)["contests"][0]
    assert [each["name"] for each in told["contestants"]] == ["dense", "moefold fused"]
    assert all(not each["failure"] for each in told["contestants"]) and told["verdicts"] == []
    text = page.read_text()
    assert_whole(text)
    assert "moefold fused" in text and "<svg" in text


@pytest.mark.parametrize("name", attentions.CONTESTANTS)
def test_attention_contestants_run(name: str) -> None:
    shape = asdict(AttentionShape(tokens=64, length=32, heads=4, kv_heads=2, dim=16))
    contestant = attentions.CONTESTANTS[name](options(shape=shape))
    contestant.run(contestant.prepare(0))
    if isinstance(contestant, Checked):
        assert contestant.relative_error(contestant.prepare(0)) < 1e-5


def test_dispatch_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "dispatch", "--world", "2", *SIZES, "--rounds", "1", "--warm", "0", "--dtype", "float32"]
    assert main([*words, "--json"]) == 0
    exchange, layer = json.loads(capsys.readouterr().out)["contests"]
    assert {"bare all-to-all", *DISPATCHERS} == {each["name"] for each in exchange["contestants"]}
    errors = [each["relative_error"] for each in layer["contestants"] if each["role"] == "ours"]
    assert errors and all(error < 1e-5 for error in errors)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["layer", "z"], "no shape named 'z'"),
        (["layer", "--top-k", "9", "--experts", "4"], "--top-k: 9 of 4 experts"),
        (["layer", "a", "--contestants", "torchtitanic"], "did you mean 'torchtitan'"),
        (["layer", "--rounds", "0", "--threads", "0"], "--threads: is 0"),
        (["dispatch", "--world", "3"], "--experts: 64 over 3 ranks"),
        (["attention", "--tokens", "100", "--length", "64"], "--tokens: 100 in documents of 64"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_three_shapes_are_those_of_the_documents() -> None:
    assert str(SHAPES["b"]) == "T=4096 h=1024 f=256 E=64 K=8 shared=256"
    assert SHAPES["a"].flops() == 18 * 1024 * 2048 * 2 * 3584


def test_neighbours_are_those_who_are_not_us() -> None:
    """Half a second of our own work is not somebody else's."""
    began = now()
    if began is None:
        pytest.skip("this kernel does not say")
    while (moment := now()) is not None and moment.own < began.own + 0.5:
        pass
    others, cores = cores_of_others(began), os.cpu_count() or 1
    # The kernel counts in ticks of 10 ms.
    assert others is not None and others <= cores - 0.4 * 0.5 / (moment.wall - began.wall)  # type: ignore[union-attr]


def test_a_contestant_that_dies_is_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of anybody when the machine has no memory left."""
    monkeypatch.setattr("moefold.bench.comparison.available_bytes", lambda: 1 << 20)
    contest = hold_contest("layer", "tiny", [Entrant("dense", "bare", options())], rounds=1, warm=0)
    assert "1.0 MiB of memory were left" in contest.standings[0].failure and contest.best_peer(FIXED) is None
