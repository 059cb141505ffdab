"""The page about a run: right numbers, nothing from elsewhere, and no surprise for runs of any length or state."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from tests.pages import assert_whole
from tests.run_records import CONTROL, info_of, record_of, tell

from moefold.cli.main import main
from moefold.config.loading import override
from moefold.errors import MoefoldError
from moefold.html.chart_scale import Scale, round_ticks, short
from moefold.recipes.catalog import recipe
from moefold.train.callbacks.jsonl import FILE_NAME, JsonLines
from moefold.train.profile.step_account import StepAccount
from moefold.train.report import expert_charts
from moefold.train.report.compare_page import compare_page
from moefold.train.report.history import MAX_BINS, MAX_FAULTS, Bin, History, _merged, read_history
from moefold.train.report.line_chart import downsample, visible_range
from moefold.train.report.run_page import page
from moefold.train.report.summary import layer_numbers, summary


def check_page(text: str) -> None:
    assert_whole(text)
    # Numbers that are none would be seen as words in paths, labels or data; pictures may spell anything.
    words = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.search(r"\b(nan|inf|infinity|undefined)\b", words, re.IGNORECASE)


def write(directory: Path, *lines: object) -> Path:
    directory.mkdir(exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (directory / FILE_NAME).write_text(text)
    return directory


def test_a_whole_run(tmp_path: Path) -> None:
    tell(JsonLines("CPU"), tmp_path)
    history = read_history(tmp_path)
    facts = summary(history)
    assert (facts["step"], facts["steps"], facts["status"], facts["tokens"]) == (20, 20, "finished", 20 * 512)
    assert (facts["first_loss"], facts["last_loss"], facts["best_validation"]) == (5.0, 0.25, 2.5)
    assert facts["tokens_per_s"] == pytest.approx(5120)
    assert facts["time"] == pytest.approx({"compute": 1.6, "waiting for data": 0.2, "saving": 0.0, "other": 0.2})
    router = facts["router"]
    assert (router["first_step"], router["last_step"], router["dead"], router["max_load"]) == (16, 20, 1, 4.0)
    assert router["layers"][1]["dead"] == (7,)
    assert [fact[:40] for fact in facts["missing"]] == ["No MFU: on a CPU, whose peak is in no ta"]
    text = page(history)
    check_page(text)
    for expected in ("made_up", "Expert load over time", "layer 1", "Routing entropy", "Gradient norm", "1 (7)"):
        assert expected in text
    assert "Skipped steps</h2>" not in text


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_short_runs(tmp_path: Path, steps: int) -> None:
    lines = JsonLines("CPU")
    lines.on_start(info_of(tmp_path))
    for step in range(1, steps + 1):
        lines.after_step(record_of(step), CONTROL)
    history = read_history(tmp_path)
    check_page(page(history))
    assert summary(history)["status"] == ("running, or killed" if steps else "no steps yet")
    assert bool(history.bins) == (steps == 5)


def test_an_empty_file(tmp_path: Path) -> None:
    history = read_history(write(tmp_path))
    check_page(page(history))
    assert "No step has been recorded yet." in page(history)


def test_a_dense_run_and_its_holes(tmp_path: Path) -> None:
    lines = JsonLines("CPU")
    lines.on_start(info_of(tmp_path))
    for step in (1, 2, 3, 7):
        skipped = "loss is <b>nan</b>" if step == 2 else None
        loss = float("nan") if step == 2 else 3.0
        lines.after_step(record_of(step, counts=None, loss=loss, skipped=skipped), CONTROL)
    text = page(read_history(tmp_path))
    check_page(text.replace("&lt;b&gt;nan&lt;/b&gt;", "").replace(r"\u003cb>nan\u003c\/b>", ""))
    assert "loss is &lt;b&gt;nan&lt;/b&gt;" in text
    for note in ("No expert load", "No validation loss", "3 steps between the first and the last have no line"):
        assert note in text


def test_strange_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    good = {"kind": "step", "step": 1, "loss": 2.0, "seconds": {"total": 1.0}}
    strange = [
        "{torn",
        "[1]",
        "null",
        "",
        {"kind": "step"},
        {"kind": "step", "step": -4},
        {"kind": "step", "step": True},
    ]
    bad_counts = [
        good | {"step": 2 + i, "counts": c} for i, c in enumerate((7, [[1], [2, 3]], [["x"]], [[-1]], [[2**70]]))
    ]
    odd = good | {"step": 9, "loss": "<script>", "balance": [], "seconds": 3, "speed": None, "grad_norm": 10**400}
    names = {"kind": "start", "step": 0, "run": "<img src=x>", "steps": "many", "config": {"model": 3}, "world": []}
    history = read_history(write(tmp_path, names, good, *strange, *bad_counts, odd, {"kind": "unheard of", "step": 3}))
    assert history.unreadable == len(strange) + len(bad_counts)
    text = page(history)
    check_page(text)
    assert "<img src=x>" not in text and "12 lines could not be read" in text


def test_a_step_recorded_twice_counts_once(tmp_path: Path) -> None:
    lines = [{"kind": "step", "step": step, "loss": loss} for step, loss in ((1, 5.0), (2, 4.0), (2, 3.0), (1, 2.0))]
    history = read_history(write(tmp_path, *lines))
    assert history.steps.tolist() == [1, 2] and history.column("loss").tolist() == [2.0, 3.0]


def test_a_hundred_thousand_steps_make_a_small_page(tmp_path: Path) -> None:
    line = '{"kind":"step","step":%d,"loss":%g,"seconds":{"total":0.1,"step":0.1},"speed":{"tokens_per_s":%d}%s}'
    counts = ',"counts":[[1,2,3,0],[4,4,4,4]],"counts_steps":100'
    lines = (line % (i, 900.0 if i == 77_777 else 3, i % 97, counts if i % 100 == 0 else "") for i in range(1, 100_001))
    history = read_history(write(tmp_path, *lines))
    text = page(history)
    check_page(text)
    assert len(text) < 400_000
    assert len(history.bins) <= MAX_BINS and sum(each.counts[0, 2] for each in history.bins) == 3 * 1000
    assert (history.bins[0].first, history.bins[-1].last) == (1, 100_000)
    assert "peaks up to 900 are cut off" in text


def test_downsampling_keeps_extremes() -> None:
    values = np.ones(10_000)
    values[1234], values[5678], values[0:50] = 9.0, -9.0, np.nan
    thinned = downsample(np.arange(1, 10_001), values)
    assert len(thinned.mean) <= 320 and np.nanmax(thinned.high) == 9 and np.nanmin(thinned.low) == -9
    assert np.isnan(thinned.mean[0]) and np.nanmean(thinned.mean) == pytest.approx(1, abs=0.01)
    few = downsample(np.array([3, 4]), np.array([1.0, 2.0]))
    assert few.x.tolist() == [3, 4] and few.mean.tolist() == few.low.tolist() == few.high.tolist() == [1, 2]


def test_the_heat_map_is_a_picture_of_the_loads() -> None:
    shown = expert_charts.indices(np.array([[4, 4, 4, 4], [16, 0, 0, 0], [1, 7, 4, 4], [0, 0, 0, 0]]))
    colors = [[expert_charts.palette()[cell] for cell in row] for row in shown]
    assert all(color[3] == 0 for color in colors[0])
    assert colors[1][0][:3] == expert_charts.WARM and colors[1][0][3] == 235
    assert [color[:3] for color in colors[1][1:]] == [expert_charts.DEAD] * 3
    assert colors[2][0][:3] == expert_charts.COLD and colors[2][0][3] == 235
    assert colors[2][1][:3] == expert_charts.WARM and 0 < colors[2][1][3] < 235
    assert {color[:3] for color in colors[3]} == {expert_charts.UNKNOWN}
    assert len(expert_charts.palette()) == 255 and shown.max() < 255


def test_layers_are_drawn_over_time(tmp_path: Path) -> None:
    """A row per layer, a column per interval: load, effective experts, and losses over their balanced value."""
    start = {"kind": "start", "step": 0, "steps": 2, "config": {"model": {"moe": {"balance": {"sequence": 0.5}}}}}
    even, one = [4, 4, 4, 4], [16, 0, 0, 0]
    rows = [
        {"counts": [even, one], "layers": {"balance": {"sequence": [0.5, 2.0], "z": [1.0, 3.0]}}},
        {"counts": [even, even], "layers": {"balance": {"sequence": [0.5, None], "z": [1.0, 3.0], "odd": [1.0]}}},
    ]
    lines = [{"kind": "step", "step": n + 1, "loss": 1.0, "counts_steps": 1} | row for n, row in enumerate(rows)]
    history = read_history(write(tmp_path / "run", start, *lines))
    assert sorted(history.bins[1].balance) == ["sequence", "z"]
    text = page(history)
    check_page(text)
    figure = next(part for part in text.split("<figure") if "<b>Layers over time</b>" in part)
    cells = {}
    for name, address in re.findall(r'alt="([^"]+)"[^>]*base64,([A-Za-z0-9+/=]+)', figure):
        picture = base64.b64decode(address)
        raw = zlib.decompressobj().decompress(picture[picture.index(b"IDAT") + 4 :])
        cells[name] = [[expert_charts.palette()[cell] for cell in raw[3 * y + 1 : 3 * y + 3]] for y in range(2)]
    assert len(cells) == 4
    # Layer 0 is balanced all the time, and has no color.
    for name in ("busiest expert over the mean", "experts in effective use over all", "sequence loss over balanced"):
        assert [color[3] for color in cells[name][0]] == [0, 0]
    (hot, cold), loss = (cells[name][1][0] for name in list(cells)[:2]), cells["sequence loss over balanced"][1]
    assert (hot, cold) == ((*expert_charts.WARM, 235), (*expert_charts.COLD, 235))
    # Four times its coefficient, then not known.
    assert loss == [(*expert_charts.WARM, 235), (*expert_charts.UNKNOWN, 60)]
    z = cells["z loss over its mean"]
    assert z[0][0][:3] == expert_charts.COLD and z[1][0][:3] == expert_charts.WARM
    assert "<th>sequence loss</th><th>z loss</th>" in text


def test_intervals_that_are_merged_weigh_their_steps() -> None:
    early, late = (
        Bin(1, 3, np.ones((1, 2), np.int64), {"z": np.array([1.0])}),
        Bin(4, 4, np.ones((1, 2), np.int64), {"z": np.array([5.0])}),
    )
    merged = _merged(early, late)
    assert (merged.first, merged.last, merged.balance["z"].tolist()) == (1, 4, [2.0])


def test_pictures_hold_their_cells() -> None:
    address = re.findall(
        r"base64,([A-Za-z0-9+/=]+)", expert_charts._picture(np.array([[2, 3, 4], [5, 6, 7]], np.uint8), "layer")
    )[0]
    picture = base64.b64decode(address)
    assert picture.startswith(b"\x89PNG") and picture[16:24] == b"\0\0\0\3\0\0\0\2"
    start = picture.index(b"IDAT") + 4
    assert zlib.decompressobj().decompress(picture[start:]) == b"\0\2\3\4\0\5\6\7"


def test_rows_of_counts_are_numbered_as_the_layers_of_the_model() -> None:
    def numbers(**model: int) -> list[int]:
        counts = SimpleNamespace(counts=np.zeros((3, 4)))
        return layer_numbers(cast(History, SimpleNamespace(last_bin=counts, start={"config": {"model": model}})))

    assert numbers(num_dense_layers=2) == [2, 3, 4]
    assert numbers(num_dense_layers=2, moe_every=2) == [3, 5, 7]
    assert numbers(moe_every=4) == [3, 7, 11]


def test_scales_and_labels() -> None:
    assert round_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert Scale(0.5, 50, 0, 1, log=True).ticks() == [0.5, 1, 2, 5, 10, 20, 50]
    assert Scale(1e-3, 1e3, 0, 1, log=True).ticks() == [1e-3, 1e-2, 1e-1, 1, 10, 100, 1000]
    assert Scale(0, 10, 100, 0)(2.5) == 75 and Scale(0, 10, 100, 0)(99) == 0
    assert [short(x) for x in (0, 0.05, 3e-4, 12.345, 999, 1234.5, 7.89e8, 1e15)] == [
        *("0", "0.05", "3e-4", "12.3", "999", "1.23K", "789M", "1Q")
    ]
    assert visible_range(np.array([]), from_zero=False) == (0, 1)
    low, high = visible_range(np.array([2.0] * 99 + [1e9]), from_zero=False)
    assert low < 2 < high < 3


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell(JsonLines("CPU"), tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert "step 20, finished" in capsys.readouterr().out
    check_page((tmp_path / "report.html").read_text())
    (tmp_path / "report.html").unlink()
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["router"]["dead"] == 1
    assert not (tmp_path / "report.html").exists()
    assert main(["report", str(tmp_path), "--json", "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").exists()


def test_what_is_not_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "metrics.jsonl: no such file" in capsys.readouterr().err
    write(tmp_path)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def data_of(text: str, name: str) -> dict:
    (found,) = re.findall(rf'<script type="application/json" data-file="{name}">(.*?)</script>', text)
    return dict(json.loads(found))


def test_the_page_holds_its_data(tmp_path: Path) -> None:
    tell(JsonLines("CPU"), tmp_path)
    text = page(read_history(tmp_path))
    data = data_of(text, "run.json")
    assert data["steps"] == list(range(1, 21)) and data["columns"]["loss"][-1] == 0.25
    assert data["summary"]["last_loss"] == 0.25 and "mfu" not in data["columns"]
    for label in ("nats per token", ">step</text>", ">GiB</text>", ">seconds</text>", "times the mean"):
        assert label in text.replace(">milliseconds<", ">seconds<")


def test_the_page_shows_the_layout(tmp_path: Path) -> None:
    run = override(recipe("debug_small"), {"parallel.pp": 2, "parallel.schedule": "1f1b"})
    start = {"kind": "start", "time": 1.0, "step": 0, "run": "pipe", "world": 2, "config": asdict(run)}
    steps = [
        {"kind": "step", "time": 2.0, "step": n, "loss": 1.0, "memory_bytes": 2**28, "seconds": {"total": 0.5}}
        for n in (1, 2, 3)
    ]
    text = page(read_history(write(tmp_path, start, *steps)))
    check_page(text)
    assert "What each pipeline rank does" in text and "Memory of every pipeline rank" in text
    assert "rank 1" in text and "256.0 MiB" in text
    # A start line whose configuration cannot be read leaves the section out and the page whole.
    start["config"] = {"no": "such"}
    other = page(read_history(write(tmp_path, start, *steps)))
    check_page(other)
    assert "What each pipeline rank does" not in other


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        start = {"kind": "start", "step": 0, "run": name, "world": 1, "config": {"optim": {"lr": lr}, "same": 1}}
        steps = [{"kind": "step", "step": n, "loss": lr * n, "tokens": 10} for n in (1, 2, 3)]
        write(tmp_path / name, start, *steps)
    out = tmp_path / "both.html"
    words = ["report", str(tmp_path / "a"), "--against", str(tmp_path / "b"), "--out", str(out)]
    assert main(words) == 0 and str(out) in capsys.readouterr().out
    text = out.read_text("utf-8")
    check_page(text)
    assert "<td class=text>optim.lr</td><td>0.1</td><td>0.2</td>" in text and "<td class=text>same</td>" not in text
    assert data_of(text, "runs.json")[str(tmp_path / "b")]["last_loss"] == pytest.approx(0.6)
    assert main([*words, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(MoefoldError, match="6 runs"):
        compare_page({str(n): read_history(tmp_path / "a") for n in range(6)})


def test_faults_are_drawn_and_told(tmp_path: Path) -> None:
    lines = JsonLines("CPU")
    lines.on_start(info_of(tmp_path))
    for step in range(1, 11):
        lines.after_step(record_of(step), CONTROL)
    lines.on_save_failed(4, "rank 1: <b>No space left</b>", 2)
    lines.on_save_failed(8, "rank 1: No space left", 0)
    lines.on_straggler(9, 3, True, {})
    lines.on_start(info_of(tmp_path, resumed_from=10))
    lines.on_roll_back(10, "weights differ")
    (tmp_path / "hangs").mkdir()
    report = {
        "what": "no rank progressed for 10.2 s",
        "sentence": "rank 2 is stopped",
        "ranks": [{"step": 6}, {"step": 5}],
    }
    (tmp_path / "hangs/hang_0001.json").write_text(json.dumps(report))
    (tmp_path / "hangs/hang_0002.json").write_text("[")
    history = read_history(tmp_path)
    assert summary(history)["faults"] == {"save_failed": 2, "straggler": 1, "restart": 1, "roll_back": 1, "hang": 2}
    text = page(history)
    check_page(text)
    assert "Faults and restarts</h2>" in text and "Faults over the run" in text and "<b>No space" not in text
    # Six have a step, and a dot.
    chart = text[text.index("Faults over the run") :]
    assert chart[: chart.index("</svg>")].count("<circle") == 6
    for words in (
        "rank 2 is stopped; no rank",
        "2 retries left",
        "; skipped",
        "rank 3 is slow",
        "hang_0002.json cannot",
    ):
        assert words in text
    assert "started again from step 10" in text and "2 failed saves" in text


def test_faults_are_bounded(tmp_path: Path) -> None:
    saves = [{"kind": "save_failed", "step": step, "reason": "full"} for step in range(1, 500)]
    history = read_history(write(tmp_path, *saves))
    text = page(history)
    check_page(text)
    assert len(history.faults) == MAX_FAULTS and "299 more are counted, not shown" in text


def test_the_page_has_bars_of_a_profile_and_survives_a_broken_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"start","step":0}\n{"kind":"step","step":1,"loss":1.0}\n')
    parts: list[dict[str, float]] = [{"compute": 3.0, "comm.ep": 1.0}, {"compute": 2.0, "wait.ep": 1.0, "comm.ep": 1.0}]
    sound = StepAccount(2, [4.0, 4.0], parts, [0.0, 1.0]).to_json()
    broken = (
        "{",
        "[]",
        '{"step":3}',
        sound.replace("comm.ep", "<script>"),
        sound.replace("3.0", '"x"'),
        sound.replace("4.0", "0"),
    )
    (tmp_path / "profile.jsonl").write_text("\n".join((*broken, sound)))
    history = read_history(tmp_path)
    assert [each.step for each in history.profile] == [2]
    text = page(history)
    assert "<script>:" not in text and "Profiled steps" in text
    boxes = re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" height="18" fill="(#\w+)">', text)
    # 830 units for 4 s; the bars of both ranks end at the same place.
    assert [(x, width) for x, y, width, _ in boxes if y == "4"] == [("70.0", "622.5"), ("692.5", "207.5")]
    assert [(x, width) for x, y, width, _ in boxes if y == "30"] == [
        ("70.0", "415.0"),
        ("485.0", "207.5"),
        ("692.5", "207.5"),
    ]
    assert len({color for *_, color in boxes}) == 3
