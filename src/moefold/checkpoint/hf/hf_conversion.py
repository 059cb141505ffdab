"""Checkpoint -> Hugging Face directory and back, one tensor at a time.

Peak memory is one tensor and the HF tensor that it is made from, never the model. All checks come before the first byte
is written, and the output gets its final name when it is complete. The tokenizer's files are copied along.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import cast

import torch

from moefold.checkpoint.files import (
    FILE_MODE,
    SHARED_DIRECTORY_MODE,
    SHARED_FILE_MODE,
    fsync_directory,
    make_directory,
    naming,
    remove_tree,
    rename,
    write_file,
)
from moefold.checkpoint.hf.config_maps import family_copies, family_rules
from moefold.checkpoint.hf.hf_config import FILE, family_of, run_for, write_config
from moefold.checkpoint.hf.hf_directory import INDEX, SINGLE, HfDirectory, check_tensors, weight_keys
from moefold.checkpoint.hf.name_rules import HfTensor, hf_copies, hf_tensors, parse_dims, tensors_of
from moefold.checkpoint.hf.untrusted_files import (
    DTYPE_KEYS,
    HeaderEntry,
    as_bytes,
    header,
    nbytes,
    open_regular,
)
from moefold.checkpoint.single_process import Progress, StoredWeights, write_whole
from moefold.checkpoint.tensor_spec import TensorSource
from moefold.checkpoint.upcycle import Upcycled, Upcycling, upcycled_model
from moefold.config.loading import dump_run
from moefold.config.model import ModelConfig
from moefold.config.precision import Format
from moefold.config.run import RunConfig
from moefold.errors import ConversionError, Problem
from moefold.precision.dtypes import TORCH_FORMATS
from moefold.private_files import OWN_MODE, replace_file

DEFAULT_SHARD = 5 * 10**9
TOKENIZER = "tokenizer"
# Only these files are copied with the weights, never opened or run; Python files and pickles are not.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_MAX_TOKENIZER_BYTES = 256 << 20


@dataclass(frozen=True)
class Converted:
    """What was written, with notes for the user."""

    path: Path
    family: str
    tensors: int
    bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


# ---- Hugging Face -> checkpoint ----


def import_directory(
    directory: HfDirectory, runs: Path, name: str, progress: Progress | None = None
) -> tuple[Converted, RunConfig]:
    """A run under ``runs/name`` whose step 0 has the directory's weights, ready to be trained on."""
    family = directory.config.model_type
    origin = {"format": "huggingface", "family": family}
    path, run = _new_run(directory, run_for(directory.config, name), runs, origin, progress)
    copied = copy_tokenizer(directory.path, runs / name / TOKENIZER)
    notes = [f"not honoured: {key} (nothing from the directory is run)" for key in directory.config.not_honoured]
    notes += [*directory.config.training_notes, *directory.notes]
    if directory.skipped:
        notes.append(
            f"skipped {len(directory.skipped)} tensors that are not part of the model: {directory.skipped[0]}, ..."
        )
    names = tuple(file.name for file in sorted(path.iterdir()))
    size = directory.num_bytes
    return Converted(path, family, len(directory.hf_tensors), size, names + copied, tuple(notes)), run


def import_upcycled(
    source: HfDirectory | StoredWeights,
    runs: Path,
    name: str,
    how: Upcycling,
    seed: int,
    progress: Progress | None = None,
) -> tuple[Converted, Upcycled]:
    """A run whose step 0 is an MoE model upcycled from the dense ``source``."""
    dense = run_for(source.config, name) if isinstance(source, HfDirectory) else replace(source.run, name=name)
    upcycled = Upcycled(source, upcycled_model(dense.model, how), how, seed)
    origin = {"format": "upcycled", **asdict(how), "seed": seed}
    path, run = _new_run(upcycled, replace(dense, model=upcycled.model), runs, origin, progress)
    folder = source.path if isinstance(source, HfDirectory) else source.path.parent.parent / TOKENIZER
    copied = copy_tokenizer(folder, runs / name / TOKENIZER)
    names = tuple(file.name for file in sorted(path.iterdir()))
    return Converted(path, "moefold", len(upcycled.names()), upcycled.num_bytes, names + copied), upcycled


def _new_run(
    source: TensorSource, run: RunConfig, runs: Path, origin: Mapping[str, object], progress: Progress | None
) -> tuple[Path, RunConfig]:
    """Step 0 of a run in its own directory, with the configuration to train it by."""
    names = {dtype: cast(Format, name) for name, dtype in TORCH_FORMATS.items()}
    params = names[source.dtype("parameter/embedding.weight")]
    run = replace(run, precision=replace(run.precision, params=params), train=replace(run.train, directory=str(runs)))
    path = write_whole(runs / run.name / "checkpoints", source, run, origin, progress)
    with naming(runs / run.name / "config.yaml"):
        replace_file(runs / run.name / "config.yaml", dump_run(run), OWN_MODE)
    return path, run


# ---- checkpoint -> Hugging Face ----


@dataclass(frozen=True)
class Export:
    """How to write a model; `context` is the longest sequence that it is meant for.

    `mtp`: with MTP modules, or without them, for families that have no names for them.
    """

    model: ModelConfig
    context: int
    dtype: torch.dtype
    max_shard: int = DEFAULT_SHARD
    tokenizer: Path | None = None
    mtp: bool = True

    @property
    def written(self) -> ModelConfig:
        return self.model if self.mtp else replace(self.model, num_mtp=0)


def export(source: TensorSource, plan: Export, out: Path, progress: Progress | None = None) -> Converted:
    """Write ``source``'s weights to the new directory ``out``."""
    if out.exists():
        raise ConversionError(Problem(str(out), "exists already", "choose another directory, or remove it"))
    family = family_of(plan.written)
    tensors = (*hf_tensors(family_rules(family), plan.written), *hf_copies(family_copies(family), plan.written))
    _check_source(source, plan.model)
    temporary = out.with_name(out.name + ".partial")
    if temporary.exists():
        remove_tree(temporary)
    make_directory(temporary, SHARED_DIRECTORY_MODE)
    try:
        files = _write_weights(source, plan, tensors, temporary, progress)
        dtype = str(plan.dtype).removeprefix("torch.")
        _write_json(temporary / FILE, write_config(plan.written, family, plan.context, dtype))
        copied = copy_tokenizer(plan.tokenizer, temporary, SHARED_FILE_MODE) if plan.tokenizer is not None else ()
        fsync_directory(temporary)
    except BaseException:
        remove_tree(temporary)
        raise
    rename(temporary, out)
    size = sum(nbytes(_dtype(hf_tensor, plan), hf_tensor.hf_shape) for hf_tensor in tensors)
    return Converted(out, family, len(tensors), size, (FILE, *files, *copied), _notes(plan))


def _check_source(source: TensorSource, model: ModelConfig) -> None:
    """The checkpoint must have exactly this model's tensors; uses the check for HF tensors."""
    keys = weight_keys(model)
    tensors = [HfTensor(s.name, (), s.shape, keys[s.name], parse_dims("", len(s.shape))) for s in tensors_of(model)]
    found = {
        name: HeaderEntry(DTYPE_KEYS.get(source.dtype(name), "?"), source.shape(name), 0, 0) for name in source.names()
    }
    check_tensors(tensors, found)


def _write_weights(
    source: TensorSource, plan: Export, tensors: Sequence[HfTensor], folder: Path, progress: Progress | None
) -> tuple[str, ...]:
    shards = list(_shards(tensors, plan))
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    keys = weight_keys(plan.model)
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, _shard_bytes(source, plan, shard, keys, progress), SHARED_FILE_MODE)
    if len(shards) == 1:
        return (SINGLE,)
    size = sum(nbytes(_dtype(hf_tensor, plan), hf_tensor.hf_shape) for hf_tensor in tensors)
    weight_map = {hf_tensor.hf_name: name for name, shard in zip(names, shards, strict=True) for hf_tensor in shard}
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return (*names, INDEX)


def _shards(tensors: Sequence[HfTensor], plan: Export) -> Iterator[list[HfTensor]]:
    """In the order of moefold's tensors; no shard is larger than ``max_shard``, except of one tensor."""
    shard: list[HfTensor] = []
    size = 0
    for hf_tensor in tensors:
        more = nbytes(_dtype(hf_tensor, plan), hf_tensor.hf_shape)
        if shard and size + more > plan.max_shard:
            yield shard
            shard, size = [], 0
        shard.append(hf_tensor)
        size += more
    yield shard


def _shard_bytes(
    source: TensorSource, plan: Export, shard: Sequence[HfTensor], keys: dict[str, str], progress: Progress | None
) -> Iterator[bytes | memoryview]:
    yield header((hf_tensor.hf_name, _dtype(hf_tensor, plan), hf_tensor.hf_shape) for hf_tensor in shard)
    for hf_tensor in chain.from_iterable(whole.split() for whole in shard):
        values = hf_tensor.to_hf(source.read(keys[hf_tensor.moefold_name], hf_tensor.box)).to(_dtype(hf_tensor, plan))
        yield as_bytes(values)
        if progress is not None:
            progress(values.nbytes)


def _dtype(hf_tensor: HfTensor, plan: Export) -> torch.dtype:
    """The loss-free bias changes by about 0.001 per step, so it has at least float32."""
    is_bias = hf_tensor.moefold_name.endswith(".expert_bias")
    return torch.promote_types(plan.dtype, torch.float32) if is_bias else plan.dtype


def _notes(plan: Export) -> tuple[str, ...]:
    notes = []
    if plan.model.moe is not None and plan.model.moe.capacity is not None:
        notes.append("trained with a capacity; transformers drops no tokens")
    if plan.written != plan.model:
        notes.append(f"left out {plan.model.num_mtp} MTP modules")
    return tuple(notes)


def _write_json(path: Path, data: Mapping[str, object]) -> None:
    write_file(path, [(json.dumps(data, indent=2) + "\n").encode()], SHARED_FILE_MODE)


def copy_tokenizer(source: Path, target: Path, mode: int = FILE_MODE) -> tuple[str, ...]:
    """Copy the tokenizer's files that exist; returns their names."""
    found = [name for name in TOKENIZER_FILES if (source / name).is_file() and not (source / name).is_symlink()]
    for name in found:
        with os.fdopen(open_regular(source / name), "rb") as file:
            content = file.read(_MAX_TOKENIZER_BYTES)
        make_directory(target)
        write_file(target / name, [content], mode)
    return tuple(found)
