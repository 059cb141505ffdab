"""Figures of the docs that come from long runs are those of the files that the runs wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def muon_rows(found: dict[str, Any]) -> list[str]:
    """One row per run: its last step and loss, and the first validated step at the target."""
    rows = []
    for name, run in sorted(found["runs"].items(), key=lambda item: (item[0].split()[0], float(item[0].split()[1]))):
        algorithm, lr = name.split()
        last = max(map(int, run["losses"]))
        reached = [int(step) for step, loss in run["losses"].items() if loss <= found["target"]]
        rows.append(f"| {algorithm} | {lr} | {last:,} | {run['losses'][str(last)]:.4f} | {min(reached, default='-')} |")
    return rows


def test_muon_against_adamw() -> None:
    found, page = json.loads((DOCS / "measured/muon_vs_adamw.json").read_text()), (DOCS / "muon.md").read_text()
    missing = [row for row in muon_rows(found) if row not in page]
    assert not missing, "write these rows into docs/muon.md:\n" + "\n".join(missing)
    best = {name: run["losses"]["1000"] for name, run in found["runs"].items() if name.startswith("adamw")}
    assert found["target"] == min(best.values()) and len(best) >= 3
    (steps,) = {min(found["steps_to_target"].values())}
    assert steps < 1000 and f"{steps} steps instead of 1,000" in page
