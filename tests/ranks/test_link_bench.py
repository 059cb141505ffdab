"""Links between ranks: which ranks measure what on which hosts, and a whole report over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from moefold.bench.link_bench import TRIALS, WARNINGS, RankRow, gather_names, measure_links, slow_ranks
from moefold.comm.spawn import spawn_ranks

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def _on_two_hosts(rank: int) -> object:
    """Ranks 0, 1 and 2 on one host, rank 3 on another, with another driver."""
    facts = {"driver": "1" if rank < 3 else "2", "torch": "x", WARNINGS: f"w{rank}"}
    with patch("socket.gethostname", lambda: "first" if rank < 3 else "second"):
        return measure_links(CPU, 0.4, 1 << 16, facts).to_json()


def test_every_rank_measures_its_links() -> None:
    reports = spawn_ranks(_on_two_hosts, 4)
    assert all(report["rows"] == reports[0]["rows"] for report in reports)
    rows = reports[0]["rows"]
    part = [[name for name in TRIALS if row["rates"][name] is not None] for row in rows]
    neighbour, inside, over, everyone = TRIALS
    assert part == [[neighbour, inside, over, everyone], [neighbour, inside, everyone], [inside, everyone],
                    [over, everyone]]  # fmt: skip
    assert all(rate > 0 for row in rows for rate in row["rates"].values() if rate is not None)
    assert [row["host"] for row in rows] == ["first"] * 3 + ["second"]
    assert reports[0]["differing"] == ["driver"] and rows[2]["facts"][WARNINGS] == "w2"


def _names(rank: int) -> list[str]:
    return gather_names("é" * (40 * rank), CPU)


def test_long_names_are_cut() -> None:
    first, second = spawn_ranks(_names, 2)
    assert first == second == ["", "é" * 32]


def test_a_slow_rank_is_named() -> None:
    rates = [300.0, 290.0, 120.0, None]
    rows = [RankRow(n, "h", "cuda", dict.fromkeys(TRIALS) | {TRIALS[1]: rate}, {}) for n, rate in enumerate(rates)]
    assert slow_ranks(rows) == ["rank 2 on h: all-reduce in host: 120 GB/s, the median is 290"]


@pytest.mark.slow
def test_the_verb_measures_under_torchrun() -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moefold.cli.main"]
    done = subprocess.run(
        [sys.executable, *words, "doctor", "--gpus", "--device", "cpu", "--seconds", "0.5", "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    links = json.loads(done.stdout)["links"]
    assert links["backend"] == "gloo" and [row["rank"] for row in links["rows"]] == [0, 1]
