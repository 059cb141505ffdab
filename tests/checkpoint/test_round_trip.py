"""One process without process groups: what was saved comes back, and what does not fit is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.saved_runs import everything, fill_moments, same, save_step, share_alone, small_run
from tests.checkpoint.saved_runs import trained_alone as trained

from moefold.checkpoint.load import Checkpoint, latest, load_into, load_latest
from moefold.checkpoint.step_dirs import verify
from moefold.config.precision import PrecisionConfig
from moefold.errors import CheckpointError, MismatchError
from moefold.pipeline.step import make_optimizer


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    local_model, optimizer = trained(seed=1)
    torch.manual_seed(5)
    path = save_step(tmp_path, local_model, optimizer, 7)
    expected, drawn = everything(local_model, optimizer), torch.rand(3)
    verify(path)
    other, its_optimizer = trained(seed=2)
    assert not same(expected, everything(other, its_optimizer))
    assert latest(tmp_path) == path
    assert load_into(path, other, its_optimizer) == {"train": {"step": 7}}
    assert same(expected, everything(other, its_optimizer))
    assert torch.equal(torch.rand(3), drawn)


def test_before_the_first_step_moments_are_zero(tmp_path: Path) -> None:
    local_model = share_alone()
    path = save_step(tmp_path, local_model, make_optimizer(local_model), 0)
    other, its_optimizer = trained(seed=2)
    load_into(path, other, its_optimizer)
    assert all(not value.any() for state in its_optimizer.state.values() for value in state.values())
    found = everything(other, its_optimizer)
    expected = everything(local_model, make_optimizer(local_model))
    assert same(expected, {name: found[name] for name in expected})


def test_a_parameter_that_never_had_a_gradient_starts_from_zeros(tmp_path: Path) -> None:
    local_model, optimizer = trained(seed=1)
    left_out = next(iter(local_model.model.parameters()))
    del optimizer.state[left_out]
    path = save_step(tmp_path, local_model, optimizer, 1)
    load_into(path, local_model, optimizer)
    assert all(not value.any() for value in optimizer.state[left_out].values())


def test_any_safetensors_tool_can_read_the_file(tmp_path: Path) -> None:
    local_model, optimizer = trained(seed=1)
    path = save_step(tmp_path, local_model, optimizer, 7)
    found = load_file(path / "ranks_00000/rank_00000.safetensors")
    found.pop("rng/0")
    assert same(found, everything(local_model, optimizer))
    assert all(file.stat().st_mode & 0o077 == 0 for file in (path, *path.rglob("*")))


def test_a_box_is_read_by_itself(tmp_path: Path) -> None:
    local_model, optimizer = trained(seed=1)
    checkpoint = Checkpoint(save_step(tmp_path, local_model, optimizer, 7))
    name = next(name for name in checkpoint.names() if name.endswith("experts.gate_up"))
    box = (slice(2, 5), slice(0, 2), slice(1, 3), slice(0, 7))
    assert torch.equal(checkpoint.read(name, box), everything(local_model, optimizer)[name][box])


def test_other_shapes_dtypes_and_layers_are_refused_by_name_before_anything_changes(tmp_path: Path) -> None:
    run = small_run()
    local_model, optimizer = trained(seed=1)
    path = save_step(tmp_path, local_model, optimizer, 7)
    deeper = replace(run, model=replace(run.model, num_layers=4))
    wider = replace(run, model=replace(run.model, vocab_size=run.model.vocab_size * 2))
    rounded = replace(run, precision=PrecisionConfig(params="bfloat16"))
    cases = (
        (deeper, "parameter/layers.3.attention_norm.weight is missing"),
        (wider, "parameter/embedding.weight has shape"),
        (rounded, "parameter/embedding.weight is torch.float32, the model has torch.bfloat16"),
    )
    for other, message in cases:
        its = share_alone(other)
        its_optimizer = make_optimizer(its)
        fill_moments(its, its_optimizer, 3)
        before = everything(its, its_optimizer)
        with pytest.raises(MismatchError, match=message):
            load_latest(tmp_path, its, its_optimizer)
        assert same(before, everything(its, its_optimizer))
    shallower = share_alone(replace(run, model=replace(run.model, num_layers=2)))
    with pytest.raises(MismatchError, match=r"parameter/layers.2.attention_norm.weight is not part of this model"):
        load_into(path, shallower, make_optimizer(shallower))


def test_weights_alone_can_be_loaded_with_and_without_an_optimizer(tmp_path: Path) -> None:
    local_model, optimizer = trained(seed=1)
    with_moments = save_step(tmp_path / "a", local_model, optimizer, 7)
    weights = save_step(tmp_path / "b", local_model, None, 7)
    other, its_optimizer = trained(seed=2)
    load_into(with_moments, other, None)
    load_into(weights, other, its_optimizer)
    assert not its_optimizer.state
    assert torch.equal(other.model.embedding.weight, local_model.model.embedding.weight)


def test_a_step_that_is_reached_again_replaces_what_was_there(tmp_path: Path) -> None:
    local_model, optimizer = trained(seed=1)
    save_step(tmp_path, local_model, optimizer, 7)
    other, its_optimizer = trained(seed=2)
    path = save_step(tmp_path, other, its_optimizer, 7)
    verify(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000007"]
    load_into(path, local_model, optimizer)
    assert same(everything(local_model, optimizer), everything(other, its_optimizer))


def test_state_that_json_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    from moefold.checkpoint.save import Saver

    saver = Saver(tmp_path, share_alone().groups["world"], 0)
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        saver.begin(1, [], {"loss": float("nan")})
    assert saver.in_progress is None
