"""A second opinion on a conversion: transformers' logits and ours, from the same weights, for the same tokens.

Needs transformers and the memory for both models. The other library is shown a config.json that we wrote and links to
the safetensors files, nothing else of the directory, so that asking for its opinion does not mean trusting a stranger.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from moefold.checkpoint.hf.directory import weight_keys
from moefold.checkpoint.hf.hf_config import FILE, family_of, write_config
from moefold.checkpoint.tensor_spec import TensorSource
from moefold.config.model import ModelConfig
from moefold.errors import BackendError
from moefold.model.build import build_decoder, local_interfaces
from moefold.nn.batch import whole_batch

_SEQUENCES, _LENGTH = 2, 37


def largest_difference(
    source: TensorSource, model: ModelConfig, directory: Path, rounded: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Between our logits from ``source`` and theirs from ``directory``; and the spread of the logits.

    Both compute in float32. If a conversion rounded, to ``rounded``, both sides' weights are: a rounded router chooses
    other experts, and that is not what is asked here.
    """
    tokens = _tokens(model)
    with torch.no_grad():
        theirs = _their_logits(model, directory, tokens, rounded)
        ours = _our_logits(source, model, tokens, rounded)
    return float((ours - theirs).abs().max()), float(theirs.std())


def difference_between(a: tuple[TensorSource, ModelConfig], b: tuple[TensorSource, ModelConfig]) -> tuple[float, float]:
    """The same for two models of ours, such as a dense one and what it was made into."""
    with torch.no_grad():
        first, second = (_our_logits(source, model, _tokens(a[1])) for source, model in (a, b))
    return float((first - second).abs().max()), float(first.std())


def _tokens(model: ModelConfig) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab_size, (_SEQUENCES, _LENGTH), generator=generator)


def _our_logits(
    source: TensorSource, model: ModelConfig, tokens: Tensor, rounded: torch.dtype = torch.float32
) -> Tensor:
    model = replace(model, num_mtp=0)  # what looks further ahead has no part in these logits
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


def _their_logits(model: ModelConfig, directory: Path, tokens: Tensor, rounded: torch.dtype) -> Tensor:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise BackendError("--check asks transformers for its opinion; install it: pip install 'moefold[hf]'") from None
    with tempfile.TemporaryDirectory(prefix="moefold-check-") as name:
        shown = Path(name)
        alone = replace(model, num_mtp=0)
        config = write_config(alone, family_of(alone), 4096, "float32")
        (shown / FILE).write_text(json.dumps(config))
        for file in directory.iterdir():
            if file.name.startswith("model") and file.name.endswith((".safetensors", ".safetensors.index.json")):
                (shown / file.name).symlink_to(file.resolve())
        theirs = AutoModelForCausalLM.from_pretrained(
            shown,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
        _round(theirs, rounded)
        return theirs.eval()(tokens).logits.flatten(0, 1)


def _round(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
