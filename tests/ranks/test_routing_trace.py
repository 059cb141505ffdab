"""Routing recorded by one run and replayed by another: the same losses to the last bit, and faults of it are found.

Runs are recorded under a policy that is not the router's own (round robin), so that a router that chose by itself, or
took another layer's or another sample's experts, would be found out.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.marks import slow_except

import moefold
from moefold.cli.main import main
from moefold.errors import ConfigError, MoefoldError
from moefold.nn.batch import Batch
from moefold.parallel import router_replay
from moefold.train import routing_trace
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.routing_loads import count_experts, deal_out, routing_loads
from moefold.train.routing_trace import RoutingTrace, recorded_steps, step_at

SETTINGS: dict[str, Any] = {
    "data.validation": None,
    "optim.lr_schedule.warmup": 0,
    "train.steps": 3,
    "train.log_every": 1,
    "train.saving.every": 0,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "padded": (1, {"data.packing": "padded"}),
    "bin_packed": (2, {"data.packing": "bin_packed", "parallel.cp": 2}),
    "dp": (2, {}),
    "ep": (2, {"parallel.ep": 2}),
    "tp": (2, {"parallel.tp": 2}),
    "cp": (2, {"parallel.cp": 2}),
    "pp": (2, {"parallel.pp": 2}),
    "recomputed": (1, {"memory.recompute": ["attention", "feed_forward", "experts"]}),
    "bounded": (2, {"parallel.ep": 2, "parallel.dispatcher": "all_to_all_bounded"}),
    "overlapped": (2, {"parallel.ep": 2, "parallel.schedule": "1f1b_overlapped"}),
    "tp, cp, pp": (8, {"parallel.tp": 2, "parallel.cp": 2, "parallel.pp": 2, "parallel.ep": 4}),
}


def trained(
    folder: Path, name: str, nproc: int, changes: dict[str, Any], policy: str | None = None
) -> tuple[list[tuple[float, float]], list[list[list[int]]]]:
    """Loss and gradient norm of every step, and tokens per layer and expert."""
    run = moefold.load_run("debug_tiny", SETTINGS | {"train.directory": str(folder)} | changes)
    run = moefold.load_run(run, {"name": name})
    trainer = moefold.Trainer(run, reporters=[JsonLines()], nproc=nproc, routing_policy=policy)
    assert trainer.fit() == "finished"
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    return [(line["loss"], line["grad_norm"]) for line in steps], [line["counts"] for line in steps]


def replay_of(folder: Path) -> dict[str, Any]:
    return {"train.routing_trace.replay": str(folder / "recorded" / "routing")}


RECORD = {"train.routing_trace.steps": 3}


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "one rank", "padded"))
def test_a_replayed_run_has_the_recorded_losses_to_the_last_bit(layout: str, tmp_path: Path) -> None:
    nproc, changes = LAYOUTS[layout]
    recorded, counts = trained(tmp_path, "recorded", nproc, changes | RECORD, "balanced")
    # Recording changes nothing.
    assert trained(tmp_path, "unrecorded", nproc, changes, "balanced")[0] == recorded
    replayed, counts_again = trained(tmp_path, "replayed", nproc, changes | replay_of(tmp_path))
    assert replayed == recorded and counts_again == counts
    assert all(a != b for a, b in zip(trained(tmp_path, "live", nproc, changes)[0], recorded, strict=True))
    # The trace against the counters of the run, which count on their own; padding is in neither.
    trace = RoutingTrace(tmp_path / "recorded" / "routing")
    assert trace.steps == (1, 2, 3)
    for step, of_step in zip(trace.steps, counts, strict=True):
        samples = trace.samples(step)
        assert sorted(samples) == list(range(8))
        assert count_experts(np.concatenate(list(samples.values())), trace.info.num_experts).tolist() == of_step


@pytest.mark.slow
def test_a_trace_of_one_layout_is_replayed_on_another(tmp_path: Path) -> None:
    wide: dict[str, Any] = {
        "precision.compute": "float64",
        "precision.params": "float64",
        "kernels.experts": "sequential",
        # A balance loss over microbatches depends on their size.
        "model.moe.balance.microbatch": 0.0,
    }
    recorded, counts = trained(tmp_path, "recorded", 1, wide | RECORD | {"data.micro_batch": 2}, "balanced")
    layout = {"parallel.tp": 2, "parallel.cp": 2, "parallel.ep": 4} | wide
    replayed, again = trained(tmp_path, "replayed", 4, layout | replay_of(tmp_path))
    assert np.array(replayed) == pytest.approx(np.array(recorded), rel=1e-12)
    assert again == counts


def other_layer(self: Any, logits_tE: Any, scores_tE: Any, bias_E: Any, batch: Batch, tokens: Any) -> Any:
    assert batch.experts_TMK is not None
    batch = replace(batch, experts_TMK=batch.experts_TMK.roll(1, 1))
    return REAL_SELECT(self, logits_tE, scores_tE, bias_E, batch, tokens)


REAL_SELECT = router_replay.ReplayedRouting.select
REAL_FILLED = RoutingTrace._filled
REAL_SAMPLES = routing_trace.samples_of


def other_sample(self: Any, step: int, batch: Any, members: Any, sizes: Any, places: Any) -> Any:
    return REAL_FILLED(self, step, batch, [(member + 1) % 8 for member in members], sizes, places)


def other_step(self: Any, step: int, batch: Any, members: Any, sizes: Any, places: Any) -> Any:
    return REAL_FILLED(self, step, batch, members, sizes, self._places(step % 3 + 1))


def last_token_left_out(self: Any, step: int, batch: Any, members: Any, sizes: Any, places: Any) -> Any:
    filled = REAL_FILLED(self, step, batch, members, sizes, places)
    experts = filled.experts_TMK.clone()
    experts[-1] = -1
    return replace(filled, experts_TMK=experts)


def members_in_reverse(data: Any, recorded: Any) -> Any:
    return REAL_SAMPLES(data._replace(members=tuple(reversed(data.members))), recorded)


def experts_rolled(data: Any, recorded: Any) -> Any:
    return REAL_SAMPLES(data, [experts_TMK.roll(1, 0) for experts_TMK in recorded])


# What is wrong, and where it is put in: while recording, or while replaying.
FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "replay takes the next layer's experts": ("replay", router_replay.ReplayedRouting, "select", other_layer),
    "replay takes the next sample's experts": ("replay", RoutingTrace, "_filled", other_sample),
    "replay takes the next step's experts": ("replay", RoutingTrace, "_filled", other_step),
    "replay leaves the last token to the router": ("replay", RoutingTrace, "_filled", last_token_left_out),
    "trace has the samples of another microbatch": ("record", routing_trace, "samples_of", members_in_reverse),
    "trace is shifted by one token": ("record", routing_trace, "samples_of", experts_rolled),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_recording_or_replay_changes_the_losses(fault: str, tmp_path: Path) -> None:
    when, where, name, wrong = FAULTS[fault]
    put_in = {when: patch.object(where, name, wrong)}
    # A policy whose choices differ between layers, samples and steps.
    with put_in.get("record", nullcontext()):
        recorded, _ = trained(tmp_path, "recorded", 1, RECORD, "sinkhorn")
    with put_in.get("replay", nullcontext()):
        replayed, _ = trained(tmp_path, "replayed", 1, replay_of(tmp_path))
    assert replayed != recorded


def test_recording_stops_after_so_many_steps_in_all(tmp_path: Path) -> None:
    trained(tmp_path, "recorded", 1, {"train.routing_trace.steps": 2, "train.steps": 3})
    folder = tmp_path / "recorded" / "routing"
    assert recorded_steps(folder) == 2
    # A second start finds them there.
    trained(tmp_path, "recorded", 1, {"train.routing_trace.steps": 2, "train.steps": 4})
    assert RoutingTrace(folder).steps == (1, 2)
    size = (folder / "step_00000001" / "part_00000.safetensors").stat().st_size
    info = RoutingTrace(folder).info
    assert 0 < size - info.step_bytes(8 * 64) < 2000
    assert recorded_steps(tmp_path) == 0


def test_another_model_or_other_data_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, "recorded", 1, {"train.routing_trace.steps": 1, "train.steps": 1})
    for changes, words in (
        ({"model.moe.top_k": 1}, "top_k 2 there, 1 here"),
        ({"seed": 5}, "data "),
        ({"data.global_batch": 4}, "global_batch 8 there, 4 here"),
    ):
        with pytest.raises(ConfigError, match=words):
            trained(tmp_path, "replayed", 1, replay_of(tmp_path) | changes)
    with pytest.raises(ConfigError, match=r"has no trace\.json"):
        trained(tmp_path, "replayed", 1, {"train.routing_trace.replay": str(tmp_path)})
    with pytest.raises(MoefoldError, match="in the middle of a batch"):
        step_at(12, 8)


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, "recorded", 1, {"train.routing_trace.steps": 1, "train.steps": 1})
    folder = tmp_path / "recorded" / "routing"
    path = folder / "step_00000001" / "part_00000.safetensors"
    good = load_file(path)
    wrong = {
        "names experts beyond 0 to 7": good | {"sample_00000003": good["sample_00000003"] + 8},
        "is I16 .64, 1, 2., not": good | {"sample_00000003": np.ascontiguousarray(good["sample_00000003"][:, :1])},
        "is I64 ": good | {"sample_00000003": good["sample_00000003"].astype(np.int64)},
        "has 63 tokens in the trace and 64": good | {"sample_00000003": good["sample_00000003"][1:]},
        "has no sample 3": {name: value for name, value in good.items() if name != "sample_00000003"},
    }
    for number, (words, content) in enumerate(wrong.items()):
        save_file(content, path)
        with pytest.raises(MoefoldError, match=words):
            trained(tmp_path, f"replayed {number}", 1, replay_of(tmp_path))
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(MoefoldError, match="header"):
        trained(tmp_path, "replayed", 1, replay_of(tmp_path))


def test_loads_of_ranks_by_hand(tmp_path: Path) -> None:
    """Two samples of four tokens, four experts on two ranks, one layer."""
    about = {"run": "by hand", "data": "", "layers": ["layers.0"], "num_experts": 4, "top_k": 1}
    about |= {"global_batch": 2, "micro_batch": 1, "format": "moefold-routing-1"}
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "trace.json").write_text(json.dumps(about))
    experts = {"sample_00000000": [0, 0, 0, 1], "sample_00000001": [0, 1, 1, 2]}
    tensors = {name: np.array(row, np.int16).reshape(4, 1, 1) for name, row in experts.items()}
    save_file(tensors, tmp_path / "step_00000001" / "part_00000.safetensors")
    # Both samples at once: 4, 3, 1 and 0 rows. In order 7 : 1; a clone of expert 0 takes 3; dealt out 4 : 4.
    found = routing_loads(RoutingTrace(tmp_path), ep=2, slots=1)
    assert (found.exchanges, found.tokens) == (1, 8)
    assert (found.ranks[0].in_order, found.ranks[0].clones, found.ranks[0].placement) == (7 / 4, 1.0, 1.0)
    assert found.stats[0].max_load == 2.0 and found.stats[0].dead == (3,)
    share = np.array([4, 3, 1]) / 8
    assert found.stats[0].entropy == pytest.approx(-(share * np.log(share)).sum() / np.log(4))
    # One sample at once. Dealt out by the first, 3 and 1 rows: experts 0 and 2 against 1 and 3, or 0 and 3 against 1
    # and 2; the second has 1, 2, 1 and 0.
    apart = routing_loads(RoutingTrace(tmp_path), ep=2, slots=1, samples=1).ranks[0]
    assert apart.in_order == (4 / 2 + 3 / 2) / 2 and apart.placement in (2 / 2, 3 / 2)
    assert deal_out([5, 4, 3, 2], 2) == [0, 1, 1, 0]
    with pytest.raises(ConfigError, match="4 experts do not divide over 3 ranks"):
        routing_loads(RoutingTrace(tmp_path), ep=3)


def test_the_verb_and_the_option(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [word for key, value in SETTINGS.items() for word in (f"--{key}", json.dumps(value))]
    words += ["--train.directory", str(tmp_path), "--trace-routing", "2"]
    assert main(["train", "debug_tiny", *words]) == 0
    assert "routing of the next 2 steps is recorded in" in capfd.readouterr().err
    folder = str(tmp_path / "debug_tiny" / "routing")
    assert main(["routing", folder, "--ep", "4"]) == 0
    said = capfd.readouterr().out
    assert "2 steps, 1,024 tokens, 8 experts, 2 per token" in said and "moefold plan --imbalance" in said
    assert main(["routing", folder, "--ep", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert len(found["layers"]) == 2 and found["imbalance"]["clones"] <= found["imbalance"]["in_order"]
    assert main(["routing", str(tmp_path)]) == 2 and main(["routing", folder, "--slots", "-1"]) == 2
