"""The rule of the loss scale against torch.amp.GradScaler and Megatron's DynamicGradScaler, and what is saved of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moefold.config.precision import LossScaleConfig, PrecisionConfig
from moefold.pipeline.step import unscale_gradients
from moefold.precision.loss_scaling import (
    LossScale,
    can_back_off,
    first_loss_scale,
    loss_scale_after_norm,
    loss_scale_from_json,
    loss_scale_to_json,
    next_loss_scale,
    resumed_loss_scale,
)
from moefold.train.skipped_steps import NotFinite, explained, is_searching, loss_scale_after

Update = Callable[[LossScale, LossScaleConfig, bool], LossScale]


def overflows(seed: int, steps: int = 120) -> list[bool]:
    """Runs of finite steps and of overflows, of any lengths."""
    random_ = random.Random(seed)
    found: list[bool] = []
    while len(found) < steps:
        found += [random_.random() < 0.5] * random_.choice((1, 1, 2, 3, 7, 20))
    return found[:steps]


def scales(update: Update, config: LossScaleConfig, found_infs: list[bool]) -> list[float]:
    state, seen = first_loss_scale(config), []
    for found_inf in found_infs:
        state = update(state, config, found_inf)
        seen.append(state.scale)
    return seen


def scales_of_torch(config: LossScaleConfig, found_infs: list[bool]) -> list[float]:
    """By torch.amp.GradScaler around an optimizer, which it must not step where a gradient is not finite."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=config.initial, growth_interval=config.window)
    seen = []
    for found_inf in found_infs:
        scaler.scale(parameter.sum() * 0.0).backward()
        parameter.grad = torch.full((1,), torch.inf if found_inf else scaler.get_scale())
        before = parameter.item()
        scaler.step(optimizer)
        scaler.update()
        assert (parameter.item() == before) == found_inf
        seen.append(scaler.get_scale())
    return seen


def scales_of_megatron(config: LossScaleConfig, found_infs: list[bool]) -> list[float]:
    """``DynamicGradScaler.update`` of Megatron-LM, written out; factors are those of its arguments."""
    scale, growth, hysteresis, seen = config.initial, 0, config.hysteresis, []
    for found_inf in found_infs:
        if found_inf:
            growth = 0
            hysteresis -= 1
            if hysteresis <= 0:
                scale = max(scale * 0.5, config.min)
        else:
            growth += 1
            if growth == config.window:
                growth = 0
                hysteresis = config.hysteresis
                scale = scale * 2.0
        seen.append(scale)
    return seen


@pytest.mark.parametrize("seed", range(8))
def test_with_hysteresis_1_it_is_torchs_grad_scaler(seed: int) -> None:
    config = LossScaleConfig(initial=2.0**16, min=2.0**-200, window=1 + seed % 5, hysteresis=1)
    assert scales(next_loss_scale, config, overflows(seed)) == scales_of_torch(config, overflows(seed))


@pytest.mark.parametrize("seed", range(24))
def test_it_is_megatrons_rule(seed: int) -> None:
    config = LossScaleConfig(initial=2.0**10, min=2.0 ** (seed % 9), window=1 + seed % 5, hysteresis=1 + seed % 4)
    assert scales(next_loss_scale, config, overflows(seed)) == scales_of_megatron(config, overflows(seed))


def growth_counted_on_skipped_steps(state: LossScale, config: LossScaleConfig, found_inf: bool) -> LossScale:
    after = next_loss_scale(state, config, found_inf)
    return replace(after, growth_tracker=state.growth_tracker + 1) if found_inf else after


def overflow_keeps_the_count(state: LossScale, config: LossScaleConfig, found_inf: bool) -> LossScale:
    after = next_loss_scale(state, config, found_inf)
    return replace(after, growth_tracker=state.growth_tracker) if found_inf else after


def hysteresis_never_whole_again(state: LossScale, config: LossScaleConfig, found_inf: bool) -> LossScale:
    after = next_loss_scale(state, config, found_inf)
    return replace(after, hysteresis_tracker=min(state.hysteresis_tracker, after.hysteresis_tracker))


def no_smallest_scale(state: LossScale, config: LossScaleConfig, found_inf: bool) -> LossScale:
    return next_loss_scale(state, replace(config, min=2.0**-1000), found_inf)


@pytest.mark.parametrize(
    "mutant",
    [
        growth_counted_on_skipped_steps,
        overflow_keeps_the_count,
        hysteresis_never_whole_again,
        no_smallest_scale,
        lambda state, config, found_inf: next_loss_scale(state, config, not found_inf),
    ],
)
def test_another_rule_is_noticed(mutant: Update) -> None:
    configs = [LossScaleConfig(initial=2.0**10, min=4.0, window=3, hysteresis=hysteresis) for hysteresis in (1, 2, 3)]
    found_infs = overflows(1)
    assert any(scales(mutant, config, found_infs) != scales_of_megatron(config, found_infs) for config in configs)


def test_a_number_stays() -> None:
    config = LossScaleConfig(scale=4096.0)
    state = first_loss_scale(config)
    assert state.scale == 4096.0 and not can_back_off(state, config)
    assert next_loss_scale(state, config, True) == next_loss_scale(state, config, False) == state


def test_it_grows_no_further_than_float32() -> None:
    config = LossScaleConfig(initial=2.0**126, window=1)
    assert scales(next_loss_scale, config, [False] * 3) == [2.0**127] * 3
    assert scales_of_torch(replace(config, hysteresis=1), [False] * 3) == [2.0**127] * 3


def test_what_is_saved_and_loaded_under_another_format() -> None:
    state = LossScale(2.0**-3, 7, -2)
    assert loss_scale_from_json(json.loads(json.dumps(loss_scale_to_json(state)))["loss_scale"]) == state
    assert loss_scale_to_json(None) == {} and loss_scale_from_json(None) is None
    float16 = PrecisionConfig(compute="float16").loss_scaling
    assert float16 == LossScaleConfig() and PrecisionConfig(compute="bfloat16").loss_scaling is None
    assert resumed_loss_scale(float16, state) == state
    assert resumed_loss_scale(float16, None) == LossScale(2.0**32, 0, 2)
    assert resumed_loss_scale(None, state) is None
    assert resumed_loss_scale(LossScaleConfig(scale=8.0), state) == LossScale(8.0, 7, -2)


def test_gradients_are_divided_exactly_and_stay_not_finite() -> None:
    wanted = torch.randn(1000)
    gradients = [wanted * 2.0**20, torch.tensor([torch.inf, torch.nan])]
    unscale_gradients(gradients, 2.0**20)
    assert torch.equal(gradients[0], wanted)
    assert gradients[1][0].isinf() and gradients[1][1].isnan()


# ---- what a skipped step means ----

PRECISION = PrecisionConfig(compute="float16", loss_scale=LossScaleConfig(initial=8.0, min=4.0, hysteresis=1, window=2))
FINITE, OVERFLOW, BAD_LOSS = NotFinite(0, 0), NotFinite(0, 2), NotFinite(1, 2)


def test_an_overflow_is_searched_over_until_the_smallest_scale() -> None:
    above, smallest = LossScale(8.0, 0, 1), LossScale(4.0, 0, 0)
    assert is_searching(OVERFLOW, above, PRECISION) and not is_searching(OVERFLOW, smallest, PRECISION)
    # Neither a loss that is not finite nor a spike is cured by another scale.
    assert not is_searching(BAD_LOSS, above, PRECISION) and not is_searching(FINITE, above, PRECISION)
    assert not is_searching(OVERFLOW, None, PrecisionConfig())


def test_only_gradients_that_are_not_finite_change_the_scale() -> None:
    before = LossScale(8.0, 1, 1)
    assert loss_scale_after(before, PRECISION, OVERFLOW) == LossScale(4.0, 0, 0)
    assert loss_scale_after(before, PRECISION, FINITE) == before
    assert loss_scale_after(before, PRECISION, None) == LossScale(16.0, 0, 1)
    assert loss_scale_after_norm(before, PRECISION.loss_scaling, torch.nan) == LossScale(4.0, 0, 0)
    assert loss_scale_after_norm(before, PRECISION.loss_scaling, 1.0) == LossScale(16.0, 0, 1)
    assert loss_scale_after_norm(None, None, 1.0) is None


def test_the_place_is_looked_for_where_no_scale_would_help() -> None:
    def said(found: NotFinite, scale: LossScale | None) -> str:
        return explained("why", found, scale, PRECISION, lambda: "there")

    assert said(OVERFLOW, LossScale(8.0, 0, 1)) == "why at loss scale 8, the next step has 4"
    assert said(OVERFLOW, LossScale(4.0, 0, 0)) == "why at loss scale 4, the next step has 4: there"
    assert said(BAD_LOSS, LossScale(8.0, 0, 1)) == "why at loss scale 8, the next step has 4: there"
    assert said(OVERFLOW, None) == "why: there" and said(FINITE, LossScale(8.0, 0, 1)) == "why"
