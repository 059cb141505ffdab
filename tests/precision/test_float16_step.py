"""Steps in float16: a loss scale is exact, gradients that would vanish survive under it, and which backends take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moefold
from moefold.model.decoder import DecoderOutput
from moefold.nn.batch import Batch
from moefold.pipeline import pipeline_state, runtime, step
from moefold.pipeline.step import compute_gradients
from moefold.train.batches import step_batches
from moefold.train.train_context import TrainContext, build_train_context

TINY: dict[str, object] = {
    "model.num_layers": 2,
    "data.seq_len": 16,
    "data.global_batch": 2,
    "data.micro_batch": 1,
    "data.validation": None,
    "train.steps": 2,
    "train.saving.every": 0,
}
# Every loss that a model can have: MTP, the balance losses, the z-loss.
ALL_LOSSES: dict[str, object] = {
    "model.num_mtp": 1,
    **{f"model.moe.balance.{name}": 0.3 for name in ("microbatch", "sequence", "global_batch", "z")},
}
FLOAT16: dict[str, object] = {"precision.compute": "float16"}


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., TrainContext]:
    def build(changes: dict[str, object], name: str = "debug_tiny") -> TrainContext:
        run = moefold.load_run(name, TINY | {"train.directory": str(tmp_path)} | changes)
        assert moefold.check(run) == []
        return build_train_context(run, 0, 1, torch.device("cpu"), 30.0)[0]

    return build


def gradients(context: TrainContext, loss_scale: float = 1.0, labels: int = 1) -> dict[str, Tensor]:
    """Of the first step, as if it had ``labels`` times as many labels and tokens; they are those of a sum."""
    batches = step_batches(context.samples, 0, context.run, context.groups, context.device).batches
    batches = [
        replace(batch, step_labels=batch.step_labels * labels, step_tokens=batch.step_tokens * labels)
        for batch in batches
    ]
    found = compute_gradients(context.local_model, context.optimizer, batches, loss_scale=loss_scale)
    return {name: gradient.clone() for name, gradient in found.gradients.items()}


def are_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative, in the norm of all gradients."""
    apart = sum(float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted)
    return (apart / sum(float(each.double().square().sum()) for each in wanted.values())) ** 0.5


# ---- exact ----


def test_a_scaled_step_in_float32_has_the_bits_of_a_plain_one(context: Callable[..., TrainContext]) -> None:
    built = context(ALL_LOSSES)
    wanted = gradients(built)
    assert are_equal(gradients(built, 2.0**20), wanted) and are_equal(gradients(built, 0.125), wanted)


def not_divided(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "unscale_gradients", lambda gradients, scale: None)


def loss_alone_scaled(patch: pytest.MonkeyPatch) -> None:
    """Balance and MTP losses enter as they are."""
    make = pipeline_state.objective_of

    def objective_of(local_model: object, output: DecoderOutput, batch: Batch) -> Tensor | None:
        plain = replace(batch, loss_scale=1.0)
        alone = make(local_model, output._replace(reports=(), ahead_loss_sums=()), batch)  # type: ignore[arg-type]
        others = make(local_model, output._replace(loss_sum=None), plain)  # type: ignore[arg-type]
        assert alone is not None and others is not None
        return alone + others

    patch.setattr(runtime, "objective_of", objective_of)


def balance_not_scaled(patch: pytest.MonkeyPatch) -> None:
    make = pipeline_state.objective_of

    def objective_of(local_model: object, output: DecoderOutput, batch: Batch) -> Tensor | None:
        plain, nothing = replace(batch, loss_scale=1.0), {"loss_sum": None, "ahead_loss_sums": ()}
        alone = make(local_model, output._replace(reports=()), batch)  # type: ignore[arg-type]
        others = make(local_model, output._replace(**nothing), plain)  # type: ignore[arg-type]
        assert alone is not None and others is not None
        return alone + others

    patch.setattr(runtime, "objective_of", objective_of)


@pytest.mark.parametrize("mutant", [not_divided, loss_alone_scaled, balance_not_scaled])
def test_a_loss_that_is_left_out_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None],
    context: Callable[..., TrainContext],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = context(ALL_LOSSES)
    wanted = gradients(built)
    mutant(monkeypatch)
    assert not are_equal(gradients(built, 2.0**20), wanted)
    assert error(gradients(built, 2.0**20), wanted) > 1e-3


# ---- underflow ----


def test_tiny_gradients_vanish_without_a_scale_and_survive_under_one(context: Callable[..., TrainContext]) -> None:
    """A step of 2**18 times as many labels, some million, has gradients of activations below float16's 6e-8."""
    labels = 2**18
    wanted = gradients(context({}), labels=labels)
    built = context(FLOAT16)
    without, under = gradients(built, labels=labels), gradients(built, 2.0**27, labels)
    vanished = sum(int(((each == 0) & (wanted[name] != 0)).sum()) for name, each in without.items())
    survived = sum(int(((each == 0) & (wanted[name] != 0)).sum()) for name, each in under.items())
    entries = sum(int((each != 0).sum()) for each in wanted.values())
    assert vanished > 0.9 * entries and survived < 0.05 * entries, (vanished, survived, entries)
    assert error(without, wanted) > 0.9 and error(under, wanted) < 5e-3, (error(without, wanted), error(under, wanted))


# ---- what takes float16 on a CPU ----

BACKENDS: dict[str, tuple[str, dict[str, object]]] = {
    "fused": ("debug_tiny", {"kernels.experts": "fused"}),
    "grouped": ("debug_tiny", {"kernels.experts": "grouped"}),
    "sequential, all scores": ("debug_tiny", {"kernels.experts": "sequential", "kernels.attention": "reference"}),
    "latent attention": ("debug_mla", {"kernels.experts": "grouped"}),
    "packed documents": ("debug_tiny", {"data.packing": "concat_masked"}),
    "rows that travel in FP8": ("debug_tiny", {"precision.dispatch": "mxfp8", "kernels.experts": "grouped"}),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_take_float16(backend: str, context: Callable[..., TrainContext]) -> None:
    """Eleven significant bits: the band excludes bfloat16, with eight, which is checked beside."""
    name, changes = BACKENDS[backend]
    wide: dict[str, object] = {"precision.compute": "float32"}
    wanted = gradients(context(changes | wide, name))
    found = error(gradients(context(changes | FLOAT16, name), 2.0**10), wanted)
    rounded = error(gradients(context(changes | {"precision.compute": "bfloat16"}, name)), wanted)
    assert 3e-4 < found < 2e-3 < 3e-3 < rounded, (found, rounded)
