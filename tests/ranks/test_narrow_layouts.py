"""Runs with a precision recipe, in layouts, against one process.

Casts of inputs and of gradients along features belong to rows, so losses are those of one process. What is narrowed
along tokens depends on which rows lie in a block: of dense layers the microbatch's own, in every layout; of experts
those that one call gets, so that gradients of experts differ by as much as narrowing changes them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.marks import slow_except

import moefold
from moefold.train.callbacks.jsonl import JsonLines

SETTINGS = {
    "precision.recipe": "mxfp8",
    "precision.params": "float64",
    "precision.compute": "float64",
    "kernels.experts": "sequential",
    "kernels.casts": "native",
    "model.num_layers": 2,
    # Two heads of keys and values of a block each, so that tensor parallelism cuts between blocks.
    "model.attention.num_heads": 4,
    "model.attention.num_kv_heads": 2,
    "model.attention.head_dim": 32,
    # A multiple of the block of 32 tokens.
    "data.seq_len": 64,
    "data.global_batch": 4,
    "data.micro_batch": 1,
    "data.validation": None,
    "optim.lr_schedule.warmup": 0,
    "train.steps": 3,
    "train.log_every": 1,
    "train.saving.every": 0,
}
LAYOUTS = {
    "ep": {"parallel.ep": 2},
    "ep, padded routing": {"parallel.ep": 2, "kernels.row_padding": "routing_map"},
    "fsdp": {},
    "flat": {"parallel.sharding": "flat"},
    "replicas": {"parallel.dp_replicate": 2, "parallel.edp_replicate": 2},
    "deferred weight gradients": {"parallel.pp": 2, "parallel.schedule": "zb_h1"},
    "context": {"parallel.cp": 2},
    "tensor": {"parallel.tp": 2},
}


# Rows that travel in MXFP8 to experts which compute in float64: nothing depends on the order of rows.
SENT_NARROW = {"precision.recipe": None, "precision.dispatch": "mxfp8"}
DISPATCHED = {
    "all_to_all": {"parallel.ep": 2},
    "deduplicated, split experts": {"parallel.etp": 2, "parallel.dispatcher": "deduplicated"},
    "all_gather, tensor": {"parallel.tp": 2, "parallel.ep": 2, "parallel.dispatcher": "all_gather"},
    "two_level, flat": {
        "parallel.ep": 2,
        "parallel.ep_inner": 2,
        "parallel.dispatcher": "two_level",
        "parallel.sharding": "flat",
    },
}


def metrics(folder: Path, changes: dict[str, object], nproc: int) -> list[tuple[float, float]]:
    run = moefold.load_run("debug_small", SETTINGS | {"train.directory": str(folder)} | changes)
    assert moefold.Trainer(run, reporters=[JsonLines()], nproc=nproc).fit() == "finished"
    lines = map(json.loads, (folder / run.name / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("layout", ["flat", "deferred weight gradients"])
def test_layouts_round_stochastically_as_one_process(layout: str, tmp_path: Path) -> None:
    recipe = {"precision.recipe": "nvfp4", "train.steps": 2}
    wanted, found = metrics(tmp_path / "one", recipe, 1), metrics(tmp_path / "two", recipe | LAYOUTS[layout], 2)
    for pair, wanted_pair in zip(found, wanted, strict=True):
        assert pair == pytest.approx(wanted_pair, rel=1e-11)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return metrics(tmp_path_factory.mktemp("one"), {}, 1)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts_narrow_as_one_process(layout: str, tmp_path: Path, one_process: list[tuple[float, float]]) -> None:
    found = metrics(tmp_path, LAYOUTS[layout], 2)
    assert len(found) == len(one_process) == 3
    assert abs(found[0][0] / one_process[0][0] - 1) < 1e-12
    # One process calls experts once per microbatch too, so that only ranks that gather rows of several differ.
    exact = 1e-11 if layout not in ("ep", "context") else 2e-3
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, one_process, strict=True):
        assert abs(loss / wanted_loss - 1) < exact and abs(norm / wanted_norm - 1) < exact, (found, one_process)


@pytest.fixture(scope="module")
def one_process_sending_narrow(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return metrics(tmp_path_factory.mktemp("one_sending"), SENT_NARROW, 1)


@pytest.mark.parametrize("layout", slow_except(DISPATCHED, "all_to_all"))
def test_narrow_dispatch_is_that_of_one_process(
    layout: str, tmp_path: Path, one_process_sending_narrow: list[tuple[float, float]]
) -> None:
    found, wanted = metrics(tmp_path, SENT_NARROW | DISPATCHED[layout], 2), one_process_sending_narrow
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, wanted, strict=True):
        assert abs(loss / wanted_loss - 1) < 1e-11 and abs(norm / wanted_norm - 1) < 1e-11, (found, wanted)


def test_inputs_that_are_kept_narrow_change_no_bit_of_a_pipeline(tmp_path: Path) -> None:
    """Two stages with deferred weight gradients: codes and scales wait with them."""
    layout = LAYOUTS["deferred weight gradients"] | {"train.steps": 2}
    narrow = {f"memory.retain.{step}": "quantize" for step in ("attention_norm", "rows", "activation")}
    wanted = metrics(tmp_path / "wide", layout, 2)
    assert metrics(tmp_path / "narrow", layout | narrow, 2) == wanted and len(wanted) == 2
