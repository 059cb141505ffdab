"""Muon over sharded parameters is Muon: any layout equals one process, from the same gradients to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.marks import slow_except
from tests.staged_runs import MODEL, on_shares, share_on, staged_run

import moefold.optim.muon
from moefold.blueprint.muon_matrices import deal, muon_algorithm
from moefold.blueprint.parameters import parameters
from moefold.comm.spawn import spawn_ranks
from moefold.config.attention import MLAConfig
from moefold.config.memory import MemoryConfig
from moefold.config.model import ModelConfig
from moefold.config.optim import OptimConfig
from moefold.config.parallel import ContextConfig, ParallelConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.config.train import SavingConfig
from moefold.nn.init import init_values
from moefold.optim.muon import Muon
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.step import make_optimizer
from moefold.recipes.catalog import RECIPES
from moefold.train.state import Outcome
from moefold.train.train_context import build_train_context
from moefold.train.train_loop import train

MLA = replace(MODEL, attention=MLAConfig(num_heads=4))
WITH_MLA = ("fsdp4", "pp2 tp2 ep2")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp4": (4, {}),
    "hybrid": (4, {"dp_replicate": 2, "edp_replicate": 2}),
    "tp2 etp2": (4, {"tp": 2, "etp": 2}),
    "ep2": (4, {"ep": 2}),
    "pp2 tp2 ep2": (4, {"pp": 2, "tp": 2, "ep": 2}),
    "cp2 ep4": (4, {"cp": 2, "ep": 4}),
    "fsdp3": (3, {}),
    "flat": (4, {"sharding": "flat", "ep": 2}),
    "flat hybrid tp2": (4, {"sharding": "flat", "tp": 2, "dp_replicate": 2, "edp_replicate": 2}),
    "flat pp2 cp2": (4, {"sharding": "flat", "pp": 2, "cp": 2}),
    "cp2 all_to_all": (2, {"cp": 2, "context": ContextConfig(full="all_to_all", windowed="all_to_all")}),
}


def muon_run(model: ModelConfig, **words: Any) -> RunConfig:
    return replace(staged_run(model, **words), optim=OptimConfig(algorithm="muon", lr=0.02, weight_decay=0.1))


def steps_from_given_gradients(local_model: LocalModel, steps: int = 3) -> dict[str, list[tuple[Any, torch.Tensor]]]:
    """Gradients are functions of the element's place in the whole tensor, as initial values are."""
    optimizer = make_optimizer(local_model)
    for step in range(steps):
        for piece in local_model.pieces():
            piece.parameter.grad = torch.zeros_like(piece.parameter)
            for box, part in piece.by_box(piece.parameter.grad):
                values = torch.empty(part.shape, dtype=part.dtype)
                init_values("matrix", 7 + step, piece.name, piece.shard.shape, box, 1.0, values)
                part.copy_(values)
        optimizer.step()
    return updated(local_model)


def updated(local_model: LocalModel) -> dict[str, list[tuple[Any, torch.Tensor]]]:
    """By name: this rank's boxes, each with its values."""
    pieces = local_model.pieces()
    return {
        piece.name: [(box, part.clone()) for box, part in piece.by_box(piece.parameter.detach())] for piece in pieces
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_one_process_to_the_bit(layout: str) -> None:
    """What AdamW updates may differ in the last bit: torch's fused update rounds the rest of a vector otherwise."""
    world, degrees = LAYOUTS[layout]
    model = MLA if layout in WITH_MLA else MODEL
    run = muon_run(model, precision=PrecisionConfig("float32", "float32"))
    want = steps_from_given_gradients(share_on(run))
    by_muon = {spec.name for spec in parameters(model) if muon_algorithm(spec.name, spec.kind) == "muon"}

    def work(local_model: LocalModel) -> int:
        found = steps_from_given_gradients(local_model)
        for name, parts in found.items():
            ((_, whole),) = want[name]
            for box, value in parts:
                if name in by_muon:
                    assert torch.equal(value, whole[box]), name
                else:
                    torch.testing.assert_close(value, whole[box], rtol=1e-6, atol=1e-7, msg=name)
        return len(by_muon & set(found))

    parallel = ParallelConfig(**degrees)
    assert min(on_shares(replace(run, parallel=parallel), world, work)) > 3


@pytest.mark.parametrize("layout", ["ep2", "flat pp2 cp2"])
def test_momentum_on_the_host_changes_no_bit(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several buckets, so that one arrives while another is orthogonalised."""
    monkeypatch.setattr(moefold.optim.muon, "deal", partial(deal, limit=500))
    world, degrees = LAYOUTS[layout]
    run = replace(muon_run(MODEL, precision=PrecisionConfig("float32", "float32")), parallel=ParallelConfig(**degrees))

    def on_host(local_model: LocalModel) -> int:
        optimizer = make_optimizer(local_model)
        muon = next(part for part in optimizer.parts if isinstance(part, Muon))
        here = [parameter for group in muon.param_groups for parameter in group["params"]]
        assert len(muon.dealing.names) > 2 and all(muon.on_host(parameter) for parameter in here)
        return len(here)

    def work(local_model: LocalModel) -> dict[str, str]:
        found = steps_from_given_gradients(local_model)
        return {name: sha256(b"".join(part.numpy().tobytes() for _, part in found[name])).hexdigest() for name in found}

    host = replace(run, memory=MemoryConfig(optimizer="host"))
    assert min(on_shares(host, world, on_host)) > 0
    assert on_shares(host, world, work) == on_shares(run, world, work)


@pytest.mark.parametrize(
    "layout",
    slow_except(["tp2 etp2", "pp2 tp2 ep2", "cp2 ep4", "hybrid", "cp2 all_to_all", "flat", "flat pp2 cp2"], "flat"),
)
def test_training_is_that_of_one_process(layout: str, tmp_path: Path) -> None:
    """Two steps of data, forward, backward, update and QK-clip, in float64."""
    world, degrees = LAYOUTS[layout]
    want = _trained(_tiny(tmp_path / "one"), 0, 1)
    free = _trained(_tiny(tmp_path / "free", bound=None), 0, 1)
    assert not all(torch.equal(want[name][0][1], free[name][0][1]) for name in want), "the bound must bind"

    run = _tiny(tmp_path / "many", ParallelConfig(**degrees))
    assert max(spawn_ranks(partial(_worst, run, world, want), world, seconds=300)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("flat", "pp2 tp2 ep2"), ("hybrid", "flat pp2 cp2")])
def test_momentum_is_read_by_any_layout(first: str, second: str, tmp_path: Path) -> None:
    """Two steps under one layout, two more under another, against four of one process."""
    want = _trained(replace_steps(_tiny(tmp_path / "one"), 4), 0, 1)
    for steps, layout in ((2, first), (4, second)):
        world, degrees = LAYOUTS[layout]
        run = replace_steps(_tiny(tmp_path / "many", ParallelConfig(**degrees)), steps)
        worst = spawn_ranks(partial(_worst, run, world, want if steps == 4 else None), world, seconds=300)
    assert max(worst) < 1e-9


def replace_steps(run: RunConfig, steps: int) -> RunConfig:
    return replace(run, train=replace(run.train, steps=steps))


def _worst(run: RunConfig, world: int, want: dict[str, list[tuple[Any, torch.Tensor]]] | None, rank: int) -> float:
    """The largest difference of any element, relative to its tensor's largest."""
    found = _trained(run, rank, world)
    if want is None:
        return 0.0
    return max(
        float((value - want[name][0][1][box]).abs().max() / want[name][0][1].abs().max())
        for name, parts in found.items()
        for box, value in parts
        if value.numel()
    )


def _tiny(directory: Path, parallel: ParallelConfig | None = None, bound: float | None = 0.005) -> RunConfig:
    base = RECIPES["debug_mla"]()
    return replace(
        base,
        data=replace(base.data, seq_len=12, global_batch=4, micro_batch=1, validation=None),
        train=replace(base.train, steps=2, directory=str(directory), saving=SavingConfig(every=0)),
        optim=OptimConfig(algorithm="muon", lr=0.02, qk_clip=bound),
        precision=PrecisionConfig("float64", "float64"),
        kernels=KernelsConfig(experts="sequential"),
        parallel=parallel or ParallelConfig(),
    )


def _trained(run: RunConfig, rank: int, world: int) -> dict[str, list[tuple[Any, torch.Tensor]]]:
    context, state = build_train_context(run, rank, world, torch.device("cpu"), 30.0)
    assert train(context, state, []) == Outcome.FINISHED
    return updated(context.local_model)
