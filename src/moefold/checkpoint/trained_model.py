"""What was trained, on one process and ready to use: a run, one of its checkpoints, or a Hugging Face directory.

The decoder is the one that training uses, in evaluation mode, without MTP modules, balance losses and capacities: every
assignment of the router is computed, so that a token's experts do not depend on the other tokens of a batch. Weights
are read tensor by tensor into place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from moefold.attention.kv_cache import CachedCore, CachedDeltaCore, KVCache
from moefold.checkpoint.hf.hf_config import run_for
from moefold.checkpoint.hf.hf_conversion import TOKENIZER
from moefold.checkpoint.hf.hf_directory import HfDirectory, weight_keys
from moefold.checkpoint.hf.untrusted_files import read_object
from moefold.checkpoint.load import latest
from moefold.checkpoint.manifest import MANIFEST
from moefold.checkpoint.single_process import StoredWeights
from moefold.checks.kernels import experts_in_use
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig
from moefold.config.precision import ComputeFormat
from moefold.config.run import RunConfig
from moefold.errors import CheckpointError
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.decoder import Decoder
from moefold.precision.dtypes import TORCH_FORMATS, set_param_dtype

_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class TrainedModel:
    """``run`` has the model as it is used; ``path`` is what was read: a checkpoint or a directory."""

    run: RunConfig
    decoder: Decoder
    cache: KVCache
    path: Path
    # Where its tokenizer is; None if nothing came with the weights.
    tokenizer: Path | None
    # Tokens that end a text, by generation_config.json.
    stop: frozenset[int] = frozenset()

    @property
    def device(self) -> torch.device:
        return self.decoder.head_weight.device

    @property
    def vocab_size(self) -> int:
        return self.run.model.vocab_size


def open_trained(path: Path, device: torch.device, compute: str | None = None) -> TrainedModel:
    """``compute`` is a format of ``TORCH_FORMATS``; None is that of the run, or the one that config.json names."""
    if (path / "config.json").exists():
        directory = HfDirectory(path)
        run, tokenizer = run_for(directory.config, path.name), path if (path / "tokenizer.json").exists() else None
        source: HfDirectory | StoredWeights = directory
    else:
        source = StoredWeights(checkpoint_in(path))
        run, beside = source.run, source.path.parent.parent / TOKENIZER
        tokenizer = beside if beside.is_dir() else None
    if compute is not None:
        run = replace(run, precision=replace(run.precision, compute=cast(ComputeFormat, compute)))
    run = replace(run, model=usable(run.model))
    decoder, cache = _build(run, device)
    _fill(decoder, source, run.model)
    stop = _stop_tokens(tokenizer if tokenizer is not None else path)
    return TrainedModel(run, decoder, cache, source.path, tokenizer, stop)


def usable(model: ModelConfig) -> ModelConfig:
    """The same function of tokens, without what only training needs."""
    moe = None if model.moe is None else replace(model.moe, capacity=None, balance=BalanceConfig())
    return replace(model, moe=moe, num_mtp=0)


def checkpoint_in(path: Path) -> Path:
    """A checkpoint itself, or the newest of a run; or an error that says what was looked for."""
    if (path / MANIFEST).exists():
        return path
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: there is no such directory; give a run (runs/NAME), one of its checkpoints "
            "(runs/NAME/checkpoints/step_...), or a Hugging Face directory with config.json and safetensors"
        )
    for root in (path / "checkpoints", path):
        if root.is_dir() and (found := latest(root)) is not None:
            return found
    raise CheckpointError(
        f"{path}: has neither config.json (a Hugging Face directory) nor a finished checkpoint (checkpoints/step_...); "
        "a run writes its first one after train.save_every steps and at its end"
    )


def _build(run: RunConfig, device: torch.device) -> tuple[Decoder, KVCache]:
    cache, dtype = KVCache(), TORCH_FORMATS[run.precision.compute]
    # What suits this device, whatever the run was trained with.
    anywhere = replace(run, kernels=replace(run.kernels, experts="auto"))
    seams = local_interfaces(experts_in_use(anywhere, device.type))
    seams = replace(
        seams,
        observe=lambda core, layer: CachedCore(core, cache, layer),
        delta_core=lambda layer: CachedDeltaCore(cache, layer),
    )
    with torch.device("meta"):
        decoder = build_decoder(run.model, dtype, seams)
    set_param_dtype(decoder, dtype)
    # Its logits are in float32, and so are its weights, as in training.
    for router in decoder.routers().values():
        router.to(torch.promote_types(dtype, torch.float32))
    return decoder.to_empty(device=device).eval().requires_grad_(False), cache


@torch.no_grad()
def _fill(decoder: Decoder, source: HfDirectory | StoredWeights, model: ModelConfig) -> None:
    tensors = decoder.state_dict()
    for name, key in weight_keys(model).items():
        tensors[name].copy_(source.read(key))


def _stop_tokens(folder: Path) -> frozenset[int]:
    if not (folder / _GENERATION).exists():
        return frozenset()
    found = read_object(folder / _GENERATION).get("eos_token_id")
    listed = found if isinstance(found, list) else [found]
    return frozenset(token for token in listed if isinstance(token, int) and not isinstance(token, bool))
