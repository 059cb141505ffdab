"""Directories as transformers saves them, and weights that exist only when asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.hf_models import hf_config
from tests.hf_weights import randomize
from torch import Tensor, nn

from moefold.blueprint.parameters import buffers, parameters
from moefold.checkpoint.hf.hf_directory import weight_keys
from moefold.checkpoint.hf.untrusted_files import SafetensorsFile
from moefold.checkpoint.tensor_spec import Box, TensorSource, sizes_of, whole
from moefold.config.model import ModelConfig
from moefold.config.run import RunConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.decoder import Decoder
from moefold.nn.init import normal_part


def saved_by_transformers(run: RunConfig, path: Path, **options: object) -> nn.Module:
    """A model of the run's family with random weights, saved to ``path`` by its own library."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config(run)).float().eval()
    randomize(model, seed=1)
    model.save_pretrained(path, **options)
    return model


def loaded_by_transformers(path: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **implementations).eval()


def decoder_of(source: TensorSource, model: ModelConfig) -> Decoder:
    decoder = build_decoder(model, torch.float32, local_interfaces("sequential"))
    decoder.load_state_dict({name: source.read(key) for name, key in weight_keys(model).items()})
    return decoder


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Everything in a directory's safetensors files."""
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        opened = SafetensorsFile(file)
        found |= {name: opened.read(name) for name in opened.entries}
        opened.close()
    return found


class Imagined:
    """A model's weights, each box computed when it is read: as large as you like, and nowhere in memory."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        keys = weight_keys(model)
        self.shapes = {keys[spec.name]: spec.shape for spec in (*parameters(model), *buffers(model))}
        self._dtype = dtype

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        box = whole(self.shapes[name]) if box is None else box
        values = torch.empty(sizes_of(box), dtype=self._dtype)
        if values.numel() > 1 << 16:  # filling properly would take longer than the test
            return values.fill_(0.5)
        normal_part(0, name, self.shapes[name], box, 0.1, values)
        return values
