"""Losses and every gradient of packed documents, against transformers' autograd on one document at a time.

transformers knows nothing of packing, chunked cross entropy, permuted experts or own backwards, so what is held
here from outside is: document masks and positions, windows and sinks, both kinds of attention, RoPE and YaRN, norms,
activations, routing with its gradient, shared experts, the head, the loss, and the backward of each.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")

from tests.hf_models import FAMILY_PROXIES, hf_config
from tests.hf_weights import our_state, randomize
from tests.published_models import PUBLISHED, hf_model, model_of, small, transformers_in_float64
from transformers import AutoModelForCausalLM, PreTrainedModel

from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig
from moefold.config.run import RunConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.nn.batch import IGNORED, whole_batch
from moefold.recipes.catalog import RECIPES

# The longest is longer than gpt-oss's window at proxy size.
LENGTHS = (9, 1, 25, 5)


def without_balance(run: RunConfig) -> RunConfig:
    """transformers has balance losses of its own definition; those have another oracle."""
    assert run.model.moe is not None
    return replace(run, model=replace(run.model, moe=replace(run.model.moe, balance=BalanceConfig())))


def documents(vocab_size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    streams = [torch.randint(vocab_size, (length + 1,), generator=generator) for length in LENGTHS]
    pairs = [(stream[:-1], stream[1:].clone()) for stream in streams]
    pairs[2][1][4] = IGNORED
    return pairs


def their_loss(model: PreTrainedModel, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for tokens, labels in pairs:
        logits = model(tokens[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits.double(), labels, ignore_index=IGNORED, reduction="sum")
    return total


@pytest.mark.parametrize("name", FAMILY_PROXIES)
def test_loss_and_gradients_are_equal(name: str) -> None:
    run = without_balance(RECIPES[name]())
    compare(run.model, AutoModelForCausalLM.from_config(hf_config(run)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_loss_and_gradients_of_published_models_are_equal(name: str) -> None:
    compare(model_of(small(name)), hf_model(small(name)))


def compare(model: ModelConfig, theirs: PreTrainedModel) -> None:
    theirs = theirs.double().eval()
    randomize(theirs, seed=1)
    ours = build_decoder(model, torch.float64, local_interfaces("sequential")).double()
    state = our_state(theirs.state_dict())
    if model.tied_embeddings:
        assert torch.equal(state.pop("head.weight"), state["embedding.weight"])
    ours.load_state_dict(state)
    pairs = documents(model.vocab_size)
    tokens, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    count = int((labels != IGNORED).sum())
    output = ours(whole_batch(tokens, labels, LENGTHS, step_labels=count, step_tokens=len(tokens)))
    assert output.loss_sum is not None
    with transformers_in_float64(theirs) if model.linear_attention is not None else nullcontext():
        want = their_loss(theirs, pairs)
    # transformers computes positions and scores in float32 whatever the model's format is.
    torch.testing.assert_close(output.loss_sum, want, rtol=2e-6, atol=0)
    output.loss_sum.backward()
    want.backward()
    gradients = {key: value.grad for key, value in theirs.named_parameters() if value.grad is not None}
    expected = our_state(gradients)
    for key, value in ours.named_parameters():
        assert value.grad is not None and value.grad.abs().max() > 0, key
        assert (value.grad - expected[key]).norm() <= 2e-5 * expected[key].norm(), key
