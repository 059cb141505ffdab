"""Checks a conversion: transformers' logits and moefold's, from the same weights, for the same tokens.

Needs transformers and the memory for both models. transformers gets a config.json written here and links to the
safetensors files, and nothing else of the directory, so that no code from it can run.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from moefold.checkpoint.hf.hf_config import FILE, family_of, write_config
from moefold.checkpoint.hf.hf_directory import weight_keys
from moefold.checkpoint.tensor_spec import TensorSource
from moefold.config.model import ModelConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.nn.batch import whole_batch
from moefold.ops.engines import load_engine

_SEQUENCES, _LENGTH = 2, 37


def largest_difference(
    source: TensorSource, model: ModelConfig, directory: Path, rounded: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Between moefold's logits from ``source`` and transformers' from ``directory``; and the standard deviation.

    Both compute in float32. If a conversion rounded to ``rounded``, both models' weights are rounded: a rounded router
    selects other experts, which is not an error of the conversion.
    """
    tokens = _tokens(model)
    with torch.no_grad():
        hf = _hf_logits(model, directory, tokens, rounded)
        moefold = _moefold_logits(source, model, tokens, rounded)
    return float((moefold - hf).abs().max()), float(hf.std())


def difference_between(a: tuple[TensorSource, ModelConfig], b: tuple[TensorSource, ModelConfig]) -> tuple[float, float]:
    """The same for two moefold models, such as a dense one and its upcycled one."""
    with torch.no_grad():
        first, second = (_moefold_logits(source, model, _tokens(a[1])) for source, model in (a, b))
    return float((first - second).abs().max()), float(first.std())


def _tokens(model: ModelConfig) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab_size, (_SEQUENCES, _LENGTH), generator=generator)


def _moefold_logits(
    source: TensorSource, model: ModelConfig, tokens: Tensor, rounded: torch.dtype = torch.float32
) -> Tensor:
    model = replace(model, num_mtp=0)  # MTP modules do not change these logits
    decoder = build_decoder(model, torch.float32, local_interfaces("sequential")).float()
    state = {name: source.read(key).float() for name, key in weight_keys(model).items()}
    decoder.load_state_dict(state)
    _round(decoder, rounded)
    count = tokens.numel()
    batch = whole_batch(
        tokens.flatten(),
        tokens.flatten(),
        (_LENGTH,) * _SEQUENCES,
        step_labels=count,
        step_tokens=count,
        step_sequences=_SEQUENCES,
    )
    return decoder.logits(batch)


def _hf_logits(model: ModelConfig, directory: Path, tokens: Tensor, rounded: torch.dtype) -> Tensor:
    transformers = load_engine("transformers")
    with tempfile.TemporaryDirectory(prefix="moefold-check-") as name:
        shown = Path(name)
        alone = replace(model, num_mtp=0)
        config = write_config(alone, family_of(alone), 4096, "float32")
        (shown / FILE).write_text(json.dumps(config))
        for file in directory.iterdir():
            if file.name.startswith("model") and file.name.endswith((".safetensors", ".safetensors.index.json")):
                (shown / file.name).symlink_to(file.resolve())
        hf_model = transformers.AutoModelForCausalLM.from_pretrained(
            shown,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
        _round(hf_model, rounded)
        return hf_model.eval()(tokens).logits.flatten(0, 1)


def _round(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
