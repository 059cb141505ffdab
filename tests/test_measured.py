"""Figures of the docs that come from long runs are those of the files that the runs wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import host_faults, throttled_exchange, throttled_walls

from benchmarks import precision_losses
from benchmarks.optimizer_formats import BASE
from benchmarks.paired_losses import differences

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


def format_rows(runs: Sequence[Mapping[str, Any]], base: str = BASE) -> list[str]:
    """One row per format: the validation loss of every seed, and how far it is from the base's of the same seed."""
    apart = differences(runs, base)
    rows = []
    for name in dict.fromkeys(each["format"] for each in runs):
        losses = [each["validation_loss"] for each in runs if each["format"] == name]
        far = [""] * len(losses) if name == base else [f" ({value:+.2%})" for value in apart[name]]
        cells = (f"{loss:.4f}{more}" for loss, more in zip(losses, far, strict=True))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def test_optimizer_formats_are_near_float32() -> None:
    """Three paired seeds, 1,000 steps: within 0.3 %."""
    runs = json.loads((DOCS / "measured/optimizer_formats.json").read_text())["runs"]
    missing = [row for row in format_rows(runs) if row not in (DOCS / "optimizer.md").read_text()]
    assert not missing, "write these rows into docs/optimizer.md:\n" + "\n".join(missing)
    assert all(each["steps"] == 1000 for each in runs)
    for name in ("bfloat16 moments, stochastic", "remainder"):
        apart = differences(runs, BASE)[name]
        assert len(apart) == 3 and max(map(abs, apart)) < 0.003


@pytest.mark.parametrize(
    ("file", "without", "words"),
    [
        ("precision_losses", set(), ("Means", "Beyond their bounds")),
        # Not enough time was left for NVFP4, which takes twice as long.
        ("precision_losses_1024", {"nvfp4"}, ("Means there", "Beyond their bounds there")),
        ("precision_losses_64_experts", set(), ("Means of these", "Beyond their bounds of these")),
    ],
)
def test_precision_recipes_are_near_bf16(file: str, without: set[str], words: tuple[str, str]) -> None:
    """1,000 steps from three paired seeds: MXFP4, which is no recipe, is beyond the bound of FP8, as it must be; which
    recipes are beyond theirs is said on the page, and so is how far bf16 is from itself."""
    runs = json.loads((DOCS / f"measured/{file}.json").read_text())["runs"]
    page = (DOCS / "precision.md").read_text()
    missing = [row for row in format_rows(runs, precision_losses.BASE) if row not in page]
    assert not missing, "write these rows into docs/precision.md:\n" + "\n".join(missing)
    assert all(each["steps"] == 1000 for each in runs)
    found = differences(runs, precision_losses.BASE)
    assert all(len(values) == 3 for values in found.values())
    assert {precision_losses.BASE, *found} == {*precision_losses.NAMES} - without
    apart = {name: sum(values) / len(values) for name, values in found.items()}
    means = ", ".join(f"{name} {value:+.2%}" for name, value in apart.items())
    assert f"{words[0]}: {means}." in " ".join(page.split()), means
    bounds = {name: bound for name, bound in precision_losses.BOUNDS.items() if name not in without}
    beyond = [name for name, bound in bounds.items() if abs(apart[name]) >= bound]
    assert f"{words[1]}: {', '.join(beyond)}." in page
    assert apart[precision_losses.MUTANT] > 4 * max(apart[name] for name in beyond)
    assert apart[precision_losses.MUTANT] > precision_losses.BOUNDS["mxfp8"]


def test_grpo_learns() -> None:
    """docs/rl.md's curve: the rewards of examples/grpo_cpu.py, and the figure that it drew of them."""
    steps = json.loads((DOCS / "measured/grpo_cpu.json").read_text())["steps"]
    rewards = [each["reward"] for each in steps]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert len(rewards) == 50 and first < 0.1 and last > 0.8
    page, figure = (DOCS / "rl.md").read_text(), (DOCS / "figures/grpo_reward.svg").read_text()
    assert f"from {first:.3f} over the first five steps to {last:.3f} over the last five" in page
    apart = max(each["apart"] for each in steps)
    assert apart < 1e-4 and f"at most {apart:.1e} apart" in page
    drawn = [float(point.split(",")[1]) for point in figure.partition('points="')[2].partition('"')[0].split()]
    # The axis has 0 at 276 and 1 at 28.
    assert [round((276 - y) / 248, 3) for y in drawn] == pytest.approx(rewards, abs=1e-3)


def signal_rows(pieces: Sequence[Mapping[str, Any]]) -> list[str]:
    """One row per kind of end, and one of what must not happen."""
    kinds = dict.fromkeys(kind for piece in pieces for kind in piece["ends"])
    rows = []
    for kind in sorted(kinds):
        ends = [piece["ends"][kind] for piece in pieces if kind in piece["ends"]]
        rows.append(f"| {kind} | {sum(end['runs'] for end in ends)} | {max(end['max_s'] for end in ends):.1f} |")
    bad = ("unsaved", "restarts_after_a_stop", "tracebacks", "other_exit_codes", "failures")
    counts = [sum(piece[name] for piece in pieces) for name in bad]
    draws = sum(piece["draws"] for piece in pieces)
    return [*rows, f"| {draws} | {' | '.join(map(str, counts))} |"]


def hang_rows(draws: Sequence[Mapping[str, Any]]) -> list[str]:
    """One row per draw."""
    counts = ("hangs", "noticed_in_bound", "noticed_in_1.5_bounds", "culprit_named", "restarted")
    return [
        f"| {each['seed']} | {' | '.join(str(each[name]) for name in counts)} | {_median_max(each['noticed_s'])} | "
        f"{_median_max(each['next_step_s'])} |"
        for each in draws
    ]


def _median_max(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.1f} / {spread['max']:.1f}"


def test_drawn_hangs() -> None:
    draws = json.loads((DOCS / "measured/hangs.json").read_text())["draws"]
    missing = [row for row in hang_rows(draws) if row not in (DOCS / "reliability.md").read_text()]
    assert not missing, "write these rows into docs/reliability.md:\n" + "\n".join(missing)
    assert sum(each["hangs"] for each in draws) >= 100
    for each in draws:
        assert len(each["each"]) == each["hangs"] == each["culprit_named"] == each["noticed_in_bound"]
        assert each["restarted"] == each["hangs"] and each["next_step_s"]["median"] <= 3


def test_drawn_signals() -> None:
    pieces = json.loads((DOCS / "measured/signals.json").read_text())["pieces"]
    missing = [row for row in signal_rows(pieces) if row not in (DOCS / "reliability.md").read_text()]
    assert not missing, "write these rows into docs/reliability.md:\n" + "\n".join(missing)
    assert not any(piece["failures"] for piece in pieces)


def kill_rows(pieces: Sequence[Mapping[str, Any]]) -> list[str]:
    """One row per seed, of all its pieces."""
    rows = []
    for seed in dict.fromkeys(piece["seed"] for piece in pieces):
        own = [piece for piece in pieces if piece["seed"] == seed]
        runs, kills, failures = (sum(piece[name] for piece in own) for name in ("runs", "kills", "failures"))
        worlds, axes = (_counts(_added(piece[name] for piece in own)) for name in ("worlds", "axes"))
        rows.append(f"| {seed} | {runs} | {kills} | {worlds} | {axes} | {failures} |")
    return rows


def _added(counted: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in counted:
        total.update(counts)
    return dict(sorted(total.items()))


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {number}" for name, number in counted.items())


def test_drawn_kills() -> None:
    pieces = json.loads((DOCS / "measured/kills.json").read_text())["pieces"]
    missing = [row for row in kill_rows(pieces) if row not in (DOCS / "reliability.md").read_text()]
    assert not missing, "write these rows into docs/reliability.md:\n" + "\n".join(missing)
    assert not any(piece["failures"] for piece in pieces)


def test_restart_times() -> None:
    """A killed rank of four: the next step has ended within two seconds, in the median."""
    found, page = json.loads((DOCS / "measured/restart_time.json").read_text()), (DOCS / "reliability.md").read_text()
    for kind in ("prepared", "unprepared"):
        times, work = found[kind]["next_step_s"], found[kind]["processor_s"]["median"]
        row = f"| {kind} | {found[kind]['restarts']} | {times['median']:.2f} / {times['max']:.2f} | {work:.2f} |"
        assert row in page, row
    assert found["prepared"]["next_step_s"]["median"] <= 2


def soak_row(found: Mapping[str, Any]) -> str:
    spread = found["next_step_s"]
    return (
        f"| {found['seed']} | {found['minutes']:g} | {found['faults']} | {found['steps']:,} | "
        f"{found['steps_under_faults']:,} | {found['effective_training_time']:.1%} | {found['steps_done_twice']} | "
        f"{found['steps_that_differ']} of {found['steps_compared']:,} | {spread['median']:.1f} / {spread['max']:.1f} |"
    )


def test_the_soak() -> None:
    """95 % of the steps of the run in peace, and its losses to the last bit."""
    found = json.loads((DOCS / "measured/soak.json").read_text())
    assert soak_row(found) in (DOCS / "reliability.md").read_text(), soak_row(found)
    assert found["minutes"] >= 89 and not found["problems"] and not found["steps_that_differ"]
    assert found["effective_training_time"] >= 0.95


def scale_rows(found: Mapping[str, Any]) -> list[str]:
    """One row per number of ranks, and one of exponents."""
    hosts = ("first host", "other host", "resharded")
    rows = []
    for row in found["rows"]:
        calls = (f"{row[host]['stats']} + {row[host]['listings']} + {row[host]['opens']}" for host in hosts)
        cells = (f"{call} | {row[host]['cpu_s']:.2f}" for host, call in zip(hosts, calls, strict=True))
        rows.append(f"| {row['world']:,} | {' | '.join(cells)} | {row['save']['index_cpu_s']:.2f} |")
    exponents = (f"N^{found['exponents'][name]:.2f}" for name in (*hosts, "save"))
    return [*rows, f"| grows as | | {' | | '.join(list(exponents)[:3])} | N^{found['exponents']['save']:.2f} |"]


def test_resuming_on_simulated_ranks() -> None:
    """16,384 ranks: at most 2 s of metadata work per host, and no faster growth than n log n."""
    found = json.loads((DOCS / "measured/checkpoint_scale.json").read_text())
    missing = [row for row in scale_rows(found) if row not in (DOCS / "reliability.md").read_text()]
    assert not missing, "write these rows into docs/reliability.md:\n" + "\n".join(missing)
    assert [row["world"] for row in found["rows"]] == [1024, 2048, 4096, 8192, 16384]
    largest = found["rows"][-1]
    assert max(largest[host]["cpu_s"] for host in ("first host", "other host", "resharded")) <= 2
    assert max(found["exponents"].values()) == found["exponents"]["n log n"]


def flip_rows(found: Mapping[str, Any]) -> list[str]:
    """One row per layout."""
    names = ("layout", "flips", "must_be_found", "found", "named", "without_replica", "skipped", "false_alarms")
    return [f"| {' | '.join(str(row[name]) for name in names)} |" for row in found["layouts"]]


def test_bit_flips_are_found() -> None:
    """Every flip that a replica or a rank's own hash can show; at most 1 % of the time at the default interval."""
    found, page = json.loads((DOCS / "measured/bit_flips.json").read_text()), (DOCS / "reliability.md").read_text()
    missing = [row for row in flip_rows(found) if row not in page]
    assert not missing, "write these rows into docs/reliability.md:\n" + "\n".join(missing)
    assert sum(row["flips"] for row in found["layouts"]) == found["flips"] >= 200
    for row in found["layouts"]:
        assert row["found"] == row["must_be_found"] and row["skipped_named"] == row["skipped"]
        assert not row["false_alarms"] and all(each["draw"][1] == "gradient" for each in row["missed"])
    for each in found["cost"]:
        assert each["fraction_of_step"] <= 0.01
        assert f"{each['comparison_seconds']:.4f} s" in page and f"{each['step_seconds']:.4f} s" in page


def straggler_rows(found: Mapping[str, Any]) -> list[str]:
    """One row per factor."""
    names = ("draws", "named_in_bound", "ended", "others_named")
    return [f"| {row['factor']:g} | {' | '.join(str(row[name]) for name in names)} |" for row in found["rows"]]


def test_slow_ranks_are_named() -> None:
    """Twice as slow: within three windows, ten of ten; no false alarm in thirty clean windows."""
    found, page = json.loads((DOCS / "measured/stragglers.json").read_text()), (DOCS / "reliability.md").read_text()
    missing = [row for row in straggler_rows(found) if row not in page]
    assert not missing, "write these rows into docs/reliability.md:\n" + "\n".join(missing)
    twice, *_ = found["rows"]
    assert twice["factor"] == 2 and twice["draws"] == twice["named_in_bound"] == twice["ended"] == 10
    assert not any(row["others_named"] for row in found["rows"])
    assert found["clean_windows"] >= 30 and found["false_alarms"] == 0
    assert f"{found['clean_windows']} windows without a slow rank had {found['false_alarms']} alarms" in page


def test_a_step_redone_by_the_living_replicas() -> None:
    """A study: exact, and not soon."""
    found, page = json.loads((DOCS / "measured/replica_loss.json").read_text()), (DOCS / "reliability.md").read_text()
    assert found["largest_relative_difference"] < 1e-9 and found["worlds"] == [4, 4, 4, 4, 2, 2, 2, 2]
    assert f"within {found['largest_relative_difference']:.1e} (relative)" in page
    assert f"takes {found['new_world_s']:.2f} s" in page
    assert f"{found['from_the_kill_to_the_redone_step_s']:.1f} s after the kill" in page


def peer_rows(found: dict[str, Any]) -> list[str]:
    yes, where = {True: "yes", False: "no"}, {True: "memory", False: "disk"}
    return [
        f"| {each['lost']} | {each['at_step']} | {each['resumed_at']} | {where[each['from_memory']]} | "
        f"{each['steps_redone']} | {each['next_step']:.1f} | {yes[each['same_losses']]} |"
        for each in found["each"]
    ]


def test_hosts_lost_with_their_memory() -> None:
    """What the other host keeps is enough; without both, the disk is."""
    found, page = json.loads((DOCS / "measured/peer_copies.json").read_text()), (DOCS / "reliability.md").read_text()
    missing = [row for row in peer_rows(found) if row not in page]
    assert not missing, "write these rows into docs/reliability.md:\n" + "\n".join(missing)
    assert found["hosts_lost"] == found["from_memory"] == 10 and found["both_lost"] == found["from_disk"] == 2
    assert found["bitwise"] == 12
    place = found["lost_place"]
    assert place["steps_redone"] == 0 and place["difference"] <= 1e-9
    assert f"differ by {place['difference']:.0e} in float64" in page


def copy_rows(found: dict[str, Any]) -> list[str]:
    return [
        f"| {row['mode']} | {row['step_s']:.3f} | {row['mean_waits_s']:.3f} | {row['ratio']:.2f} | "
        f"{row['ratio_of_means']:.2f} |"
        for row in found["rows"]
    ]


def test_what_copies_in_memory_cost() -> None:
    found, page = json.loads((DOCS / "measured/memory_copies.json").read_text()), (DOCS / "reliability.md").read_text()
    missing = [row for row in copy_rows(found) if row not in page]
    assert not missing, "write these rows into docs/reliability.md:\n" + "\n".join(missing)
    assert f"mean load {found['load']:g}" in page


def test_lost_ranks() -> None:
    """Losses of a run that has lost ranks for good are those of the run in peace."""
    rows = json.loads((DOCS / "measured/loss_of_ranks.json").read_text())["rows"]
    page, bounds = (DOCS / "reliability.md").read_text(), {"float64": 1e-9, "float32": 5e-6}
    shown = [
        f"| {row['layout']} | {row['dtype']} | {row['lost']} | {row['new_layout']} | {row['difference']:.1e} | "
        f"{row['seconds']:.1f} |"
        for row in rows
    ]
    missing = [row for row in shown if row not in page]
    assert not missing, "write these rows into docs/reliability.md:\n" + "\n".join(missing)
    assert all(row["difference"] <= bounds[row["dtype"]] and row["world"] == 4 and row["seconds"] <= 10 for row in rows)


def test_failed_saves_end_no_run() -> None:
    found = json.loads((DOCS / "measured/save_faults.json").read_text())
    names = ("failed_saves", "runs", "failed_attempts", "skipped", "runs_ended", "runs_that_differ")
    row = f"| {' | '.join(str(found[name]) for name in names)} |"
    assert row in (DOCS / "reliability.md").read_text(), f"write this row into docs/reliability.md:\n{row}"
    assert found["runs_ended"] == found["runs_that_differ"] == 0 and min(found["kinds"].values()) > 0


def test_host_faults() -> None:
    page, found = (DOCS / "reliability.md").read_text(), json.loads((DOCS / "measured/host_faults.json").read_text())
    assert host_faults.table(found) in page, "python -m tests.host_faults --write"
    assert found["faults"] == len(found["each"]) + len(found["failed"])
    assert found["recovered"] == sum(one["same_losses"] for one in found["each"])


def test_walls_of_slowed_links_and_hosts() -> None:
    found = json.loads((DOCS / "measured/throttled_walls.json").read_text())
    _shown(throttled_walls.page_rows(found), "metrics.md")
    settings = found["settings"].values()
    assert len(settings) >= 10 and {each["measured"]["wall"] for each in settings} == {
        "compute",
        "communication",
        "host",
    }
    assert all(each["predicted"]["wall"] == each["measured"]["wall"] for each in settings)


def test_overlap_on_a_slow_link() -> None:
    found = json.loads((DOCS / "measured/throttled_exchange.json").read_text())
    _shown(throttled_exchange.page_rows(found), "pipelines.md")
    for part in ("pairs", "one microbatch"):
        assert len({round(each["loss"], 5) for each in found[part]["settings"].values()}) == 1


def _shown(rows: list[str], page: str) -> None:
    text = (DOCS / page).read_text()
    missing = [row for row in rows if row not in text]
    assert not missing, f"write these rows into docs/{page}:\n" + "\n".join(missing)
