"""The candidates of `benchmarks.step` do the same work: loss, norm and updated parameters agree after several steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.step_by_hand import StepByHand, run_of
from benchmarks.step_candidates import MoefoldStep
from benchmarks.step_hf_trainer import _hf_layout, _hf_name, trainer

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
    moefold, by_hand = MoefoldStep(options()), StepByHand(options())
    for seed in range(3):
        for candidate in (moefold, by_hand):
            candidate.run(candidate.prepare(seed))  # type: ignore[arg-type]
        assert moefold.last is not None
        assert by_hand.loss == pytest.approx(float(moefold.last.sums.loss), rel=1e-6)
        assert by_hand.norm == pytest.approx(float(moefold.last.grad_norm), rel=1e-5)
        assert by_hand.norm > 0.5, "nothing was clipped"
    for name, parameter in moefold.local_model.model.named_parameters():
        torch.testing.assert_close(by_hand.w[name], parameter, rtol=0, atol=2e-5)


def test_what_is_saved_for_backward_is_counted() -> None:
    moefold, by_hand = MoefoldStep(options()), StepByHand(options())
    assert 0 < by_hand.saved_bytes(by_hand.prepare(0)) <= moefold.saved_bytes(moefold.prepare(0))


def test_the_trainer_trains_the_same_model() -> None:
    """Without a balance loss in moefold as well; the first step's tokens are those of seed 0, read at its start."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    chosen = options(**{"model.moe.balance.microbatch": "0", "optim.clip_norm": "100"})
    moefold, hf = MoefoldStep(chosen), trainer("eager")(chosen)
    moefold.run(moefold.prepare(0))
    hf.run(hf.prepare(0))
    found = dict(hf.model.named_parameters())  # type: ignore[attr-defined]
    lr = run_of(chosen).optim.lr
    apart = 0
    for name, parameter in moefold.local_model.model.named_parameters():
        expected, there = _hf_layout(parameter.detach()), found[_hf_name(name)].detach()
        apart += int(((there - expected).abs() > 0.01 * lr).sum())
    # The first update of Adam is +lr or -lr, whatever the gradient: where that is nearly 0, its last digit decides.
    assert apart < 1e-3 * sum(parameter.numel() for parameter in moefold.local_model.model.parameters())
