"""Our decoder and transformers' model of the same family, with the same random weights, give the same logits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tests.body.model_inputs import batch_of, fill
from tests.hf_models import FAMILY_PROXIES, hf_config
from tests.hf_weights import our_state, randomize
from transformers import AutoModelForCausalLM

from moefold.model.build import build_decoder, local_interfaces
from moefold.recipes.catalog import RECIPES


@pytest.mark.parametrize("backend", ["sequential", "grouped"])
@pytest.mark.parametrize("name", FAMILY_PROXIES)
def test_logits_are_equal(name: str, backend: str) -> None:
    run = RECIPES[name]()
    theirs = AutoModelForCausalLM.from_config(hf_config(run)).float().eval()
    randomize(theirs, seed=1)
    ours = build_decoder(run.model, torch.float32, local_interfaces(backend))
    ours.load_state_dict(our_state(theirs.state_dict()))
    batch = batch_of(2, 37, run.model.vocab_size)
    with torch.no_grad():
        expected = theirs(batch.tokens_S.view(2, 37)).logits.flatten(0, 1)
        logits = ours.logits(batch)
    assert expected.std() > 0.1, "the comparison means little when logits hardly differ"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_the_comparison_can_fail() -> None:
    """A small change to any single parameter moves the logits by more than the tolerance."""
    run = RECIPES["deepseek_v3_proxy"]()
    ours = build_decoder(run.model, torch.float32, local_interfaces("sequential"))
    fill(ours)
    batch = batch_of(2, 37, run.model.vocab_size)
    with torch.no_grad():
        before = ours.logits(batch)
        for name, value in ours.named_parameters():
            kept = value.clone()
            # One entry, not all alike: a norm after a matrix would hide a common factor.
            value.view(-1)[value.numel() // 2] += 0.1
            assert (ours.logits(batch) - before).abs().max() > 1e-5, name
            value.copy_(kept)
