"""`moefold profile`: its table, its JSON, its files, and the clocks of two hosts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.support import on_ranks

from moefold.cli.main import main
from moefold.comm.clock_offsets import clock_offsets
from moefold.comm.process_groups import Groups

SMALL = ["--model.num_layers", "2", "--data.micro_batch", "1", "--data.global_batch", "4", "--data.seq_len", "32"]


@pytest.mark.slow
def test_profile_prints_and_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "debug_small", "--nproc", "2", "--parallel.ep", "2", "--steps", "2", "--out", str(tmp_path)]
    assert main([*words, *SMALL, "--gpu", "H100", "--json", "--ranges", "torch"]) == 0
    said = capfd.readouterr()
    found = json.loads(said.out)
    assert found["steps"] == [2, 3] and found["world"] == 2
    assert found["added_up"] > 0.98 and found["ranks"][1]["comm.ep"] > 0
    assert found["wall"]["measured"] in ("communication", "compute", "host")
    assert found["wall"]["predicted"] in ("memory", "communication", "compute", "host")
    assert "warmed up" in said.err and "step 2 of 2" in said.err
    folder = tmp_path / "debug_small"
    assert not (folder / "checkpoints").exists()
    names = sorted(path.name for path in (folder / "profile").iterdir())
    assert names[0] == "step_00000001.trace.json" and "torch_step_00000003_rank_00001.json" in names
    # The spans are ranges of torch's profiler.
    assert "compute: optimizer" in (folder / "profile" / "torch_step_00000003_rank_00001.json").read_text()
    # Again: what is there belongs to a profile, and is replaced.
    assert main([*words, *SMALL]) == 0
    assert "add up to it within 0.0%" in capfd.readouterr().out


def test_profile_refuses_no_steps_and_a_run_that_would_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "debug_small", "--steps", "0"]) == 2
    assert "--steps: 0 is no number of steps" in capsys.readouterr().err
    (tmp_path / "debug_small" / "checkpoints").mkdir(parents=True)
    assert main(["profile", "debug_small", "--out", str(tmp_path)]) == 2
    assert "would resume" in capsys.readouterr().err


def test_clocks_of_other_hosts_are_compared() -> None:
    """Ranks 2 and 3 are on another host, whose clock is 1,234.5 s ahead; what is found is right within its bound."""

    def work(groups: Groups) -> list[tuple[float, float]]:
        ahead = 1234.5 if groups.rank >= 2 else 0.0
        return clock_offsets(groups["world"], lambda: time.perf_counter() + ahead, f"host {groups.rank // 2}")

    for found in on_ranks(work, 4):
        assert tuple(found[0]) == tuple(found[1]) == (0.0, 0.0)
        assert found[2] == found[3]
        offset, bound = found[2]
        assert 0 < bound < 0.5 and abs(offset - 1234.5) <= bound
