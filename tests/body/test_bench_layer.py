"""Comparisons: their statistics, candidates that compute the same function, and tiny comparisons from end to end."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tests.pages import assert_whole

from benchmarks import attention, attention_candidates, dispatch, layer
from benchmarks.attention_candidates import AttentionShape
from benchmarks.command_line import run_script
from benchmarks.comparison import Setting, run_comparison, too_slow
from benchmarks.comparison_report import comparison_json, comparison_text
from benchmarks.dispatch import DISPATCHERS
from benchmarks.layer_candidates import BASELINES, CANDIDATES, MOEFOLD
from benchmarks.process_stats import busy_cores_of_others, cpu_times, measured_peak
from benchmarks.results import CHANGING, FIXED, CandidateResult, CandidateSpec, Comparison, Run
from benchmarks.runner import Checked, Options
from benchmarks.targets import AS_LAUNCHED, BEST_PEER, SAME, Target, verdicts
from benchmarks.timed_layer import saved_for_backward
from moefold.bench.clock import rounds_within, spread
from moefold.bench.layer_workload import SHAPES, LayerShape
from moefold.cli.main import main

TINY = LayerShape(tokens=64, dim=32, hidden=16, experts=4, top_k=2, shared=16)
SIZES = ["--tokens", "64", "--dim", "32", "--hidden", "16", "--experts", "4", "--top-k", "2", "--shared", "16"]


def options(dtype: str = "float32", **more: object) -> Options:
    return {"shape": asdict(TINY), "dtype": dtype, "threads": 1, "allocator": "default"} | more


def result(name: str, role: str, seconds: list[float], **more: object) -> CandidateResult:
    runs = tuple(Run(wall=2 * taken, cpu=taken, faults=3) for taken in seconds)
    return CandidateResult(CandidateSpec(name, role, {"threads": 1}), {CHANGING: runs}, **more)  # type: ignore[arg-type]


def invented(rounds: int = 7, **more: object) -> Comparison:
    """A machine that gets slower and slower, and one library that rounds too much."""
    drift = [1.0 + number for number in range(rounds)]
    results = (
        result("dense", "baseline", drift),
        result("moefold", "moefold", [1.5 * base for base in drift], saved=10, peak=50),
        result("quick", "peer", [1.2 * base for base in drift], error=0.5, saved=5, peak=1),
        result("slow", "peer", [3.0 * base for base in drift], error=1e-3, saved=20, peak=100),
        result("absent", "peer", [], failure="ModuleNotFoundError: No module named 'absent'"),
    )
    return Comparison("invented", "cpu", rounds, results, tolerance=0.1, **more)  # type: ignore[arg-type]


# ---- what is made of runs ----


def test_ratios_are_taken_round_by_round() -> None:
    """The drift is sevenfold, and no ratio sees it."""
    ratio = invented().ratio("moefold", "dense", CHANGING)
    assert ratio is not None and ratio.low == ratio.median == ratio.high == 1.5


def test_the_spread_is_the_middle_half() -> None:
    found = spread([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)


def test_a_peer_that_computes_something_else_is_not_the_best() -> None:
    assert invented().best_peer(CHANGING) == "slow"


def test_verdicts_follow_the_limits() -> None:
    targets = (
        Target("moefold", "time", "dense", 1.6, stretch=1.3),
        Target("moefold", "time", "dense", 1.4),
        Target("moefold", "time", BEST_PEER, 0.5, allocators=(AS_LAUNCHED,)),
        Target("moefold", "time", BEST_PEER, 0.1, allocators=(SAME,)),
        Target("moefold", "saved", "", 10),
        Target("moefold", "peak", BEST_PEER, 0.4),
        Target("nobody", "time", "dense", 1.0),
    )
    found = verdicts(invented(), targets, AS_LAUNCHED)
    assert [each.reached for each in found] == [True, False, True, True, False, None]
    assert found[0].text.endswith("1.5x, reached (stretch 1.3x: missed)") and "MISSED" in found[1].text
    assert "(slow)" in found[2].text and "not measured" in found[-1].text


def test_few_rounds_give_no_verdict() -> None:
    found = verdicts(invented(rounds=3), [Target("moefold", "time", "dense", 1.6)], AS_LAUNCHED)
    assert found[0].reached is None and "needs 7" in found[0].text


def test_reports_name_who_is_absent_and_why() -> None:
    text = comparison_text(invented(), ("dense",), [])
    assert "No module named 'absent'" in text and "too large" in text and "CPU time" in text
    told = comparison_json(invented(), ("dense",), [])
    assert json.loads(json.dumps(told))["candidates"][1]["routings"][CHANGING]["ratios"]["dense"]["median"] == 1.5


# ---- candidates ----


@pytest.mark.parametrize("name", MOEFOLD)
def test_moefolds_layer_computes_the_exact_output(name: str) -> None:
    layer = CANDIDATES[name](options())
    assert layer.relative_error(layer.prepare(3)) < 1e-5  # type: ignore[attr-defined]
    prepared = layer.prepare(3)
    layer.run(prepared)
    assert prepared.grad is not None
    assert (layer.saved_bytes(layer.prepare(3)) or 0) > 0


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_bounds_have_the_flops_of_the_shape(name: str, dtype: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    roofline = CANDIDATES[name](options(dtype))
    prepared = roofline.prepare(0)
    with FlopCounterMode(display=False) as counted:
        roofline.run(prepared)
    # torch's counter does not count grouped matmuls.
    whole = TINY.flops() if name == "dense" else 3 * 6 * TINY.tokens * TINY.dim * TINY.shared
    assert counted.get_total_flops() == whole


def test_another_seed_is_another_routing() -> None:
    roofline = CANDIDATES["grouped_mm"](options())
    assert torch.equal(roofline.prepare(1), roofline.prepare(1))
    assert not torch.equal(roofline.prepare(1), roofline.prepare(2))
    assert roofline.prepare(1)[-1] == TINY.rows


def test_transformers_layer_computes_the_exact_output() -> None:
    pytest.importorskip("transformers")
    layer = CANDIDATES["transformers grouped_mm"](options())
    assert layer.relative_error(layer.prepare(3)) < 1e-5  # type: ignore[attr-defined]


# ---- memory ----


def test_a_storage_is_saved_once_and_parameters_never() -> None:
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    # The matmul saves x and the weight, the sine its own input, twice.
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


@pytest.mark.slow
def test_candidates_alternate_and_failures_are_reported() -> None:
    specs = [
        CandidateSpec("moefold sequential", "moefold", options(allocator="kept")),
        CandidateSpec("grouped_mm", "baseline", options(dtype="float8")),
    ]
    said: list[str] = []
    comparison = run_comparison(
        "layer",
        "tiny",
        specs,
        Setting("float32", rounds=2, warm=1),
        lambda what, done, total: said.append(f"{what} {done}"),
    )
    moefold, failed = comparison.results
    assert failed.failure == "KeyError: 'float8'" and not failed.runs[FIXED]
    assert len(moefold.runs[FIXED]) == len(moefold.runs[CHANGING]) == 2
    assert moefold.saved and moefold.error is not None and moefold.error < 1e-5
    assert "changing routing, rounds 2" in said


class Clock:
    """Stands still but for what rounds take."""

    def __init__(self) -> None:
        self.now = 0.0

    def rounds(self, budget: float, rounds: int, warm: int, *seconds: float) -> tuple[int, int]:
        """How many are warm-up and how many count, where the last time is that of all further rounds."""
        found = [0, 0]
        for number, round_ in enumerate(rounds_within(budget, rounds, warm, lambda: self.now)):
            found[round_.counts] += 1
            assert round_.number == found[round_.counts] and round_.of == (rounds if round_.counts else warm)
            self.now += seconds[min(number, len(seconds) - 1)]
        return found[0], found[1]


@pytest.mark.parametrize(
    ("budget", "seconds", "expected"),
    [
        (float("inf"), (1.0,), (8, 9)),
        (30.0, (0.1,), (8, 9)),
        # 17 rounds of three seconds do not fit: warm-up gets 8/17 of them.
        (30.0, (3.0,), (4, 6)),
        # The first run plans GEMMs and takes five times as long.
        (30.0, (10.0, 2.0), (1, 9)),
        # One round counts whatever it takes, after one of warm-up.
        (30.0, (100.0,), (1, 1)),
    ],
)
def test_rounds_fit_a_budget(budget: float, seconds: tuple[float, ...], expected: tuple[int, int]) -> None:
    clock = Clock()
    assert clock.rounds(budget, 9, 8, *seconds) == expected
    assert clock.now <= budget or expected == (1, 1)


def test_no_warm_up_is_none() -> None:
    assert Clock().rounds(5.0, 3, 0, 1.0) == (0, 3) and Clock().rounds(float("inf"), 3, 0, 1.0) == (0, 3)


def test_the_slowest_peers_are_left_out_until_a_verdict_fits() -> None:
    """Seven rounds need 7 * (1 + 1 + 9 + 4) = 105 s with all, 42 s without the slowest, 14 s without both peers."""
    taken, peers = [1.0, 1.0, 9.0, 4.0], [False, False, True, True]
    assert too_slow(taken, peers, 200.0) == []
    assert too_slow(taken, peers, 100.0) == [2]
    assert too_slow(taken, peers, 41.0) == [2, 3]
    # moefold and the lower bounds stay, and who has failed already does not count.
    assert too_slow(taken, peers, 1.0) == [2, 3] and too_slow([1.0, 0.0], [False, True], 1.0) == []


@pytest.mark.slow
def test_layer_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "layer.html"
    words = [*SIZES, "--candidates", "dense,moefold fused", "--routing", "changing"]
    assert layer.main([*words, "--rounds", "2", "--warm", "1", "--json", "--out", str(page)]) == 0
    told = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert [each["name"] for each in told["candidates"]] == ["dense", "moefold fused"]
    assert all(not each["failure"] for each in told["candidates"]) and told["verdicts"] == []
    text = page.read_text()
    assert_whole(text)
    assert "moefold fused" in text and "<svg" in text


def test_bench_layer_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the wheel: moefold's layer and its dense lower bound."""
    assert main(["bench", "layer", *SIZES, "--rounds", "2", "--warm", "1", "--dtype", "float32", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["layers"]
    assert set(found["timings"]) == {"moefold", "dense matmuls"}
    for timing in found["timings"].values():
        assert len(timing["cpu"]) == 2 and timing["gflops"] > 0
    assert main(["bench", "layer", *SIZES, "--rounds", "1", "--warm", "0"]) == 0
    assert "x dense matmuls" in capsys.readouterr().out


def test_bench_step_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["data.seq_len=32", "data.global_batch=2", "data.micro_batch=1", "model.num_layers=1"]
    words = ["bench", "step", *(word for change in small for word in ("--set", change))]
    assert main([*words, "--rounds", "1", "--warm", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = found["timings"]["moefold"]["seconds"]["median"]
    assert found["tokens_per_second"] == pytest.approx(64 / seconds) and 0 < found["matmul_utilization"] < 1
    assert main(["bench", "step", "--set", "data.seq_len"]) == 2
    assert "has no '='" in capsys.readouterr().err


@pytest.mark.parametrize("name", attention_candidates.CANDIDATES)
def test_attention_candidates_run(name: str) -> None:
    shape = asdict(AttentionShape(tokens=64, length=32, heads=4, kv_heads=2, dim=16))
    candidate = attention_candidates.CANDIDATES[name](options(shape=shape))
    candidate.run(candidate.prepare(0))
    if isinstance(candidate, Checked):
        assert candidate.relative_error(candidate.prepare(0)) < 1e-5


@pytest.mark.slow
def test_dispatch_script(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world", "2", *SIZES, "--rounds", "1", "--warm", "0", "--dtype", "float32"]
    assert dispatch.main([*words, "--json"]) == 0
    exchange, ep_layer = json.loads(capsys.readouterr().out)["comparisons"]
    assert {"bare all-to-all", *DISPATCHERS} == {each["name"] for each in exchange["candidates"]}
    errors = [each["relative_error"] for each in ep_layer["candidates"] if each["role"] == "moefold"]
    assert errors and all(error < 1e-5 for error in errors)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["layer", "z"], "no shape named 'z'"),
        (["layer", "--top-k", "9", "--experts", "4"], "--top-k: 9 of 4 experts"),
        (["layer", "a", "--candidates", "torchtitanic"], "did you mean 'torchtitan'"),
        (["layer", "--rounds", "0", "--threads", "0"], "--threads: is 0"),
        (["dispatch", "--world", "3"], "--experts: 64 over 3 ranks"),
        (["attention", "--tokens", "100", "--length", "64"], "--tokens: 100 in documents of 64"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = {"layer": layer, "dispatch": dispatch, "attention": attention}[words[0]]
    assert run_script(script.main, words[1:]) == 2
    assert said in capsys.readouterr().err


def test_the_three_shapes_are_those_of_the_documents() -> None:
    assert str(SHAPES["b"]) == "T=4096 D=1024 F=256 E=64 K=8 shared=256"
    assert SHAPES["a"].flops() == 18 * 1024 * 2048 * 2 * 3584


def test_own_work_is_not_counted_as_others_load() -> None:
    """Half a second of own CPU time."""
    began = cpu_times()
    if began is None:
        pytest.skip("this kernel does not say")
    while (moment := cpu_times()) is not None and moment.own < began.own + 0.5:
        pass
    others, cores = busy_cores_of_others(began), os.cpu_count() or 1
    # The kernel counts in ticks of 10 ms.
    assert others is not None and others <= cores - 0.4 * 0.5 / (moment.wall - began.wall)  # type: ignore[union-attr]


def test_a_candidate_that_dies_is_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """No candidate runs when the machine has no memory left."""
    monkeypatch.setattr("benchmarks.comparison.available_bytes", lambda: 1 << 20)
    comparison = run_comparison(
        "layer", "tiny", [CandidateSpec("dense", "baseline", options())], Setting(rounds=1, warm=0)
    )
    assert "1.0 MiB of memory left" in comparison.results[0].failure and comparison.best_peer(FIXED) is None
