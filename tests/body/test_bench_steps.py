"""The contestants of `bench step` do the same work: loss, norm and updated parameters agree after several steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefold.bench.steps.by_hand import StepByHand
from moefold.bench.steps.hf_trainer import _their_form, _their_name, trainer
from moefold.bench.steps.ours import OurStep
from moefold.bench.steps.task import run_of

SMALL = {
    "model.dim": "64",
    "model.num_layers": "2",
    "model.vocab_size": "256",
    "model.attention.num_heads": "4",
    "model.attention.head_dim": "16",
    "model.moe.num_experts": "8",
    "model.moe.top_k": "2",
    "model.moe.expert_hidden_dim": "32",
    "data.seq_len": "32",
    "data.global_batch": "4",
    "data.micro_batch": "2",
    "optim.clip_norm": "0.5",
}


def options(**changes: str) -> dict[str, Any]:
    return {"dtype": "float32", "threads": 1, "allocator": "default", "set": SMALL | changes}


def test_the_step_by_hand_is_moefolds_step() -> None:
    ours, by_hand = OurStep(options()), StepByHand(options())
    for seed in range(3):
        for contestant in (ours, by_hand):
            contestant.run(contestant.prepare(seed))  # type: ignore[arg-type]
        assert ours.last is not None
        assert by_hand.loss == pytest.approx(float(ours.last.sums.loss), rel=1e-6)
        assert by_hand.norm == pytest.approx(float(ours.last.grad_norm), rel=1e-5)
        assert by_hand.norm > 0.5, "nothing was clipped"
    for name, parameter in ours.local_model.model.named_parameters():
        torch.testing.assert_close(by_hand.w[name], parameter, rtol=0, atol=2e-5)


def test_what_is_saved_for_backward_is_counted() -> None:
    ours, by_hand = OurStep(options()), StepByHand(options())
    assert 0 < by_hand.saved_bytes(by_hand.prepare(0)) <= ours.saved_bytes(ours.prepare(0))


def test_the_trainer_trains_the_same_model() -> None:
    """Without a balance loss on our side as well; the first step's tokens are those of seed 0, read at its start."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    chosen = options(**{"model.moe.balance.microbatch": "0", "optim.clip_norm": "100"})
    ours, theirs = OurStep(chosen), trainer("eager")(chosen)
    ours.run(ours.prepare(0))
    theirs.run(theirs.prepare(0))
    found = dict(theirs.model.named_parameters())  # type: ignore[attr-defined]
    rate = run_of(chosen).optim.lr
    apart = 0
    for name, parameter in ours.local_model.model.named_parameters():
        expected, there = _their_form(parameter.detach()), found[_their_name(name)].detach()
        apart += int(((there - expected).abs() > 0.01 * rate).sum())
    # The first update is the rate, whatever the gradient: where that is nearly 0, its last digit decides.
    assert apart < 1e-3 * sum(parameter.numel() for parameter in ours.local_model.model.parameters())
