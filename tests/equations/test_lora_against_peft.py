"""Adapters against Hugging Face's PEFT: it loads what we write, and computes the same logits and the same gradients.

PEFT wraps transformers' own modules, so it knows nothing of stacked gates, permuted experts or grouped matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from tests.body.model_inputs import batch_of
from tests.equations.test_gradients_against_transformers import without_balance
from tests.hf_models import FAMILY_PROXIES, hf_config
from tests.hf_weights import our_state, randomize
from tests.marks import slow_except
from transformers import AutoModelForCausalLM

from moefold.blueprint.lora_adapters import is_adapter
from moefold.blueprint.parameters import parameters
from moefold.checkpoint.hf.peft_adapters import peft_layout, read_adapters, write_adapters
from moefold.checkpoint.lora_weights import Merged
from moefold.checkpoint.tensor_spec import Box
from moefold.config.model import LoraConfig, ModelConfig
from moefold.errors import ConversionError
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.decoder import Decoder
from moefold.recipes.catalog import RECIPES

LORA = LoraConfig(rank=4, alpha=6.0)
TARGETS = {
    "all": LORA.targets,
    "attention": ("layers.*.attention.*",),
    "gate_up of experts": ("*.experts.gate_up",),
    "down of experts, layer 1": ("layers.1.*.experts.down",),
}


class Held:
    """Tensors of a model in memory, as checkpoints name them."""

    def __init__(self, model: Decoder) -> None:
        self.values = {f"parameter/{name}": value.detach() for name, value in model.named_parameters()}

    def names(self) -> Sequence[str]:
        return tuple(self.values)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.values[name].dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self.values[name] if box is None else self.values[name][box]


def both(name: str, targets: tuple[str, ...], dtype: torch.dtype) -> tuple[ModelConfig, Decoder, torch.nn.Module]:
    """Our model with random adapters, and transformers' with the same weights and none."""
    run = without_balance(RECIPES[name]())
    theirs = AutoModelForCausalLM.from_config(hf_config(run)).to(dtype).eval()
    randomize(theirs, seed=1)
    model = replace(run.model, lora=replace(LORA, targets=targets))
    ours = build_decoder(model, dtype, local_interfaces("sequential")).to(dtype)
    missing, unexpected = ours.load_state_dict(our_state(theirs.state_dict()), strict=False)
    assert not unexpected and all(map(is_adapter, missing)) and missing
    generator = torch.Generator().manual_seed(5)
    for key, value in ours.named_parameters():
        if is_adapter(key):
            value.data = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.05
    return model, ours, theirs


def with_adapters(ours: Decoder, model: ModelConfig, theirs: torch.nn.Module, out: Path) -> torch.nn.Module:
    dtype = next(ours.parameters()).dtype
    write_adapters(Held(ours), model, out, dtype)
    return peft.PeftModel.from_pretrained(theirs, str(out), is_trainable=True, autocast_adapter_dtype=False)


@pytest.mark.parametrize("targets", TARGETS)
def test_logits_with_adapters_in_pefts_format_are_equal(targets: str, tmp_path: Path) -> None:
    _compare_logits("qwen3_30b_a3b_proxy", TARGETS[targets], tmp_path)


@pytest.mark.parametrize("name", slow_except(FAMILY_PROXIES, "deepseek_v3_proxy", "gpt_oss_20b_proxy"))
def test_logits_of_every_family_are_equal(name: str, tmp_path: Path) -> None:
    _compare_logits(name, LORA.targets, tmp_path)


def _compare_logits(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    model, ours, theirs = both(name, targets, torch.float32)
    batch = batch_of(2, 37, model.vocab_size)
    with torch.no_grad():
        without = theirs(batch.tokens_S.view(2, 37)).logits.flatten(0, 1)
        adapted = with_adapters(ours, model, theirs, tmp_path / "adapters").eval()
        expected = adapted(batch.tokens_S.view(2, 37)).logits.flatten(0, 1)
        logits = ours.logits(batch)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        assert (logits - without).abs().max() > 1e-3, "adapters that change nothing show nothing"
        # What was written is read back to the bit.
        lora, values = read_adapters(tmp_path / "adapters", replace(model, lora=None))
        assert (lora.rank, lora.alpha) == (LORA.rank, LORA.alpha)
        live = dict(ours.named_parameters())
        assert {key for key in live if is_adapter(key)} == set(values)
        assert all(torch.equal(live[key], value) for key, value in values.items())
        # Merged, the model needs no adapters. In float64: sums in another order may decide a near tie of the router.
        merged = Merged(Held(ours.double()), model)
        plain = build_decoder(merged.model, torch.float64, local_interfaces("sequential")).double()
        ours.embedding.compute = torch.float64
        state = {key.partition("/")[2]: merged.read(key) for key in merged.names()}
        plain.load_state_dict(state | dict(ours.named_buffers()))
        torch.testing.assert_close(plain.logits(batch), ours.logits(batch), rtol=0, atol=1e-9)
        for key in merged.names():
            shape = merged.shape(key)
            box = tuple(slice(size // 3, size) for size in shape)
            assert torch.equal(merged.read(key, box), merged.read(key)[box])


@pytest.mark.parametrize("name", slow_except(FAMILY_PROXIES, "qwen3_30b_a3b_proxy", "deepseek_v3_proxy"))
def test_gradients_of_adapters_are_equal(name: str, tmp_path: Path) -> None:
    model, ours, theirs = both(name, LORA.targets, torch.float64)
    adapted = with_adapters(ours, model, theirs, tmp_path / "adapters").eval()
    for key, value in ours.named_parameters():
        value.requires_grad_(is_adapter(key))
    batch = batch_of(1, 37, model.vocab_size)
    output = ours(batch)
    assert output.loss_sum is not None
    output.loss_sum.backward()
    logits = adapted(batch.tokens_S.view(1, 37)).logits.flatten(0, 1)
    F.cross_entropy(logits.double(), batch.labels_S, reduction="sum").backward()
    found = {key.replace(".default", ""): value.grad for key, value in adapted.named_parameters() if "lora_" in key}
    live = dict(ours.named_parameters())
    compared = 0
    for each in peft_layout(model).tensors:
        expected = each.from_peft(found[each.key])
        gradient = live[each.spec.name].grad[each.index]
        assert expected.abs().max() > 0, each.key
        # transformers computes positions and scores in float32 whatever the model's format is.
        assert (gradient - expected).norm() <= 2e-5 * expected.norm(), each.key
        compared += 1
    assert compared == len(found)
    assert all(value.grad is None for key, value in live.items() if not is_adapter(key))


def test_what_peft_cannot_hold_is_refused() -> None:
    model = replace(RECIPES["deepseek_v3_proxy"]().model, num_mtp=1, lora=replace(LORA, targets=("*.attention.*",)))
    with pytest.raises(ConversionError, match=r"mtp\.0\.block\.attention.*PEFT knows no MTP modules"):
        peft_layout(model)


def test_a_configuration_that_says_more_is_refused(tmp_path: Path) -> None:
    model, ours, _ = both("qwen3_30b_a3b_proxy", ("*.attention.q.*",), torch.float32)
    write_adapters(Held(ours), model, tmp_path / "adapters", torch.float32)
    config = tmp_path / "adapters" / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(ConversionError, match=r"use_dora.*True"):
        read_adapters(tmp_path / "adapters", replace(model, lora=None))
    assert {spec.name for spec in parameters(model)} > {spec.name for spec in parameters(replace(model, lora=None))}
