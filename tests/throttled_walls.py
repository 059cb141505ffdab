"""Which wall binds, predicted before and measured after, where links and hosts are slowed down by known amounts.

Two ranks in two network namespaces joined by a link of a chosen rate. `moefold bench calibrate` measures the computer
once; each setting is planned with the rate of its link (`--nic`) and what its host does beside training (``host_ms``),
and then runs under `moefold profile`, which decides from measured shares by the planner's own rule.

    python -m tests.throttled_walls --json docs/measured/throttled_walls.json

Needs the right to make network namespaces, and a core per rank that nothing else uses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.two_hosts import HOSTS, two_hosts

from moefold.api.plans import plan
from moefold.api.runs import load_run
from moefold.cli.main import main as moefold_main
from moefold.hardware.machine import machine_json, read_machine

SIZES: dict[str, Any] = {
    "model.num_layers": 4,
    "model.dim": 256,
    "model.moe.expert_hidden_dim": 192,
    "data.seq_len": 256,
    "data.micro_batch": 4,
    "data.global_batch": 16,
    "data.prefetch": 0,
    "train.log_every": 1,
}
# `two_hosts` cannot be told to have no limit; this is more than two processes of a computer reach.
FAST = 20_000


@dataclass(frozen=True)
class Setting:
    """``host_ms``: how late every batch is."""

    mbit_s: int
    changes: dict[str, Any] = field(default_factory=dict)
    host_ms: float = 0.0


SETTINGS: dict[str, Setting] = {
    "experts over a slow link": Setting(100, {"parallel.ep": 2}),
    "experts over a link of 375 Mbit/s": Setting(375, {"parallel.ep": 2}),
    "experts, wide, over a fast link": Setting(FAST, {"parallel.ep": 2, "model.moe.expert_hidden_dim": 768}),
    "parameters over a slow link": Setting(100),
    "few parameters over a fast link": Setting(FAST, {"model.moe.expert_hidden_dim": 64, "data.micro_batch": 8}),
    "stages over a slow link": Setting(10, {"parallel.pp": 2}),
    "stages over a fast link": Setting(FAST, {"parallel.pp": 2}),
    "tensors over a link of 375 Mbit/s": Setting(375, {"parallel.tp": 2}),
    "late batches, stages over a fast link": Setting(FAST, {"parallel.pp": 2}, host_ms=2000.0),
    "late batches, experts over a link of 375 Mbit/s": Setting(375, {"parallel.ep": 2}, host_ms=6000.0),
}


def predicted(setting: Setting, machine: Path) -> dict[str, Any]:
    """Wall, seconds and shares of a step."""
    with tempfile.TemporaryDirectory() as folder:
        delayed = Path(folder) / "machine.json"
        delayed.write_text(machine_json(replace(read_machine(machine), host_ms=setting.host_ms)))
        run = load_run("debug_small", SIZES | setting.changes)
        found = plan(run, gpus=2, machine=delayed, nic_gb_s=setting.mbit_s / 8e3, search=False)
    time_of = found.proposal.chosen.time
    shares = {name: time_of.of(name) / time_of.step_seconds for name in ("communication", "host")}
    return {"wall": found.wall, "step_s": time_of.step_seconds, "shares": shares}


def measured(setting: Setting, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, two_hosts(f"{setting.mbit_s}mbit"):
        words = [word for name, value in (SIZES | setting.changes).items() for word in (f"--{name}", str(value))]
        words += ["--steps", str(steps), "--out", folder, "--json"]
        ranks = [_start(rank, setting.host_ms, words) for rank in range(2)]
        try:
            said = [rank.communicate(timeout=600) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise RuntimeError("\n".join(error[-2000:] for _, error in said))
    found = json.loads(said[0][0])
    shares = {name: found["shares"][name] for name in ("communication", "host")}
    return {"wall": found["wall"]["measured"], "step_s": found["step_seconds"], "shares": shares}


def _start(rank: int, host_ms: float, words: list[str]) -> subprocess.Popen[str]:
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29511}
    names = {"MASTER_ADDR": "10.99.0.1", "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    command = (
        "ip",
        "netns",
        "exec",
        HOSTS[rank],
        sys.executable,
        "-m",
        "tests.throttled_walls",
        "--late",
        str(host_ms),
    )
    environment = os.environ | {name: str(value) for name, value in place.items()} | names
    return subprocess.Popen(
        [*command, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def train_with_late_batches(host_ms: float, words: list[str]) -> int:
    from moefold.train import train_loop

    read = train_loop.read_local_step

    def late(*given: Any) -> Any:
        time.sleep(host_ms * 1e-3)
        return read(*given)

    with patch.object(train_loop, "read_local_step", late):
        return moefold_main(["profile", "debug_small", *words])


def page_rows(found: dict[str, Any]) -> list[str]:
    """As docs/metrics.md has them."""
    rows = []
    for name, each in found["settings"].items():
        link = "fast" if each["mbit_s"] == FAST else f"{each['mbit_s']} Mbit/s"
        late = f"{each['host_ms'] / 1e3:.0f} s" if each["host_ms"] else "-"
        cells = [name, link, late]
        for side in (each["predicted"], each["measured"]):
            shares = (f"{share:.0%}".replace("%", " %") for share in side["shares"].values())
            cells.append(", ".join((side["wall"], f"{side['step_s']:.1f} s", *shares)))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, help="what `moefold bench calibrate` wrote (it runs first)")
    parser.add_argument("--steps", type=int, default=3, help="profiled steps of each setting (3)")
    parser.add_argument("--only", default="", help="settings whose names have these words")
    parser.add_argument("--plan", action="store_true", help="predict only")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        machine = args.machine or Path(folder) / "machine.json"
        if args.machine is None:
            moefold_main(["bench", "calibrate", "--world", "2", "--out", str(machine)])
        settings = {}
        for name, setting in SETTINGS.items():
            if args.only not in name:
                continue
            each: dict[str, Any] = {"mbit_s": setting.mbit_s, "host_ms": setting.host_ms}
            each |= {"changes": setting.changes, "predicted": predicted(setting, machine)}
            if not args.plan:
                each["measured"] = measured(setting, args.steps)
            settings[name] = each
            print(name, json.dumps(each), flush=True)
    if args.plan:
        return 0
    found = {"cores": os.cpu_count(), "steps": args.steps, "sizes": SIZES, "settings": settings}
    agree = sum(each["predicted"]["wall"] == each["measured"]["wall"] for each in settings.values())
    print("\n".join(page_rows(found)))
    print(f"{agree} of {len(settings)} agree")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if agree == len(settings) else 1


if __name__ == "__main__":
    if "--late" in sys.argv[1:2]:
        sys.exit(train_with_late_batches(float(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
