from __future__ import annotations

from math import inf, nan

import pytest

from moefold.config.train import HealthConfig
from moefold.errors import CheckpointError, TrainingError
from moefold.train.state import TrainState, after_step, skip_reason

SPIKES = HealthConfig(spike_sigma=6.0, spike_window=32, max_consecutive_skips=3)


def warm() -> TrainState:
    state = TrainState()
    for i in range(20):
        state = after_step(state, 2.0 + 0.01 * (i % 3), 1.0 + 0.01 * (i % 2), None, SPIKES)
    return state


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("where", ["loss", "balance loss z", "gradient norm"])
def test_what_is_not_finite_is_objected_to_and_enters_no_statistic(bad: float, where: str) -> None:
    state = warm()
    loss, z, norm = (bad if where == name else 2.0 for name in ("loss", "balance loss z", "gradient norm"))
    reason = skip_reason(state, loss, {"sequence": 0.1, "z": z}, norm, HealthConfig())
    assert reason == f"{where} is {bad}"
    after = after_step(state, loss, norm, reason, SPIKES)
    assert (after.losses, after.norms, after.skips_in_a_row) == (state.losses, state.norms, 1)
    assert skip_reason(after, 2.01, {}, 1.0, SPIKES) is None


def test_a_spike_is_objected_to_only_when_asked_for_and_known() -> None:
    assert skip_reason(warm(), 50.0, {}, 1.0, HealthConfig()) is None
    assert "sigma above" in str(skip_reason(warm(), 50.0, {}, 1.0, SPIKES))
    assert "gradient norm" in str(skip_reason(warm(), 2.0, {}, 9.0, SPIKES))
    assert skip_reason(TrainState(), 50.0, {}, 1.0, SPIKES) is None


def test_too_many_skips_in_a_row_end_the_run_and_one_good_step_starts_over() -> None:
    state = after_step(warm(), nan, 1.0, "loss is nan", SPIKES)
    state = after_step(state, nan, 1.0, "loss is nan", SPIKES)
    assert after_step(state, 2.0, 1.0, None, SPIKES).skips_in_a_row == 0
    with pytest.raises(TrainingError, match=r"3 steps in a row .* loss is nan"):
        after_step(state, nan, 1.0, "loss is nan", SPIKES)


def test_the_state_survives_json_and_refuses_what_it_did_not_write() -> None:
    state = warm()
    assert TrainState.from_json(state.to_json()) == state
    with pytest.raises(CheckpointError, match="samples"):
        TrainState.from_json({"step": 3})
