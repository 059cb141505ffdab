"""Checkpoint -> Hugging Face directory and back, one tensor at a time.

Peak memory is one tensor and the piece of another that it is made from, never the model. Everything that can be wrong
is found before the first byte is written, and what is written gets its final name only when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint.files import fsync_directory, make_directory, remove_tree, rename, write_file
from moefold.checkpoint.hf.config_maps import family_copies, family_rules
from moefold.checkpoint.hf.directory import INDEX, SINGLE, HfDirectory, check_tensors, weight_keys
from moefold.checkpoint.hf.hf_config import FILE, family_of, run_for, write_config
from moefold.checkpoint.hf.name_rules import Piece, copies, parse_dims, pieces, tensors_of
from moefold.checkpoint.hf.safetensors_file import NAMES, Entry, as_bytes, header, nbytes
from moefold.checkpoint.hf.tokenizer import carry_tokenizer
from moefold.checkpoint.single_process import Progress, StoredWeights, write_whole
from moefold.checkpoint.tensor_spec import TensorSource
from moefold.checkpoint.upcycle import Upcycled, Upcycling, upcycled_model
from moefold.config.loading import dump_run
from moefold.config.model import ModelConfig
from moefold.config.run import RunConfig
from moefold.errors import ConversionError, Problem
from moefold.precision.dtypes import TORCH_FORMATS

DEFAULT_SHARD = 5 * 10**9
TOKENIZER = "tokenizer"


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
    carried = carry_tokenizer(directory.path, runs / name / TOKENIZER)
    notes = [f"not honoured: {key} (nothing from the directory is run)" for key in directory.config.not_honoured]
    notes += directory.notes
    if directory.left_out:
        notes.append(f"left out {len(directory.left_out)} tensors beside the model: {directory.left_out[0]}, ...")
    names = tuple(file.name for file in sorted(path.iterdir()))
    size = directory.num_bytes
    return Converted(path, family, len(directory.pieces), size, names + carried, tuple(notes)), run


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
    beside = source.path if isinstance(source, HfDirectory) else source.path.parent.parent / TOKENIZER
    carried = carry_tokenizer(beside, runs / name / TOKENIZER)
    names = tuple(file.name for file in sorted(path.iterdir()))
    return Converted(path, "moefold", len(upcycled.names()), upcycled.num_bytes, names + carried), upcycled


def _new_run(
    source: TensorSource, run: RunConfig, runs: Path, origin: Mapping[str, Any], progress: Progress | None
) -> tuple[Path, RunConfig]:
    """Step 0 of a run in its own directory, with the configuration to train it by."""
    params = {dtype: name for name, dtype in TORCH_FORMATS.items()}[source.dtype("parameter/embedding.weight")]
    run = replace(run, precision=replace(run.precision, params=params), train=replace(run.train, directory=str(runs)))
    path = write_whole(runs / run.name / "checkpoints", source, run, origin, progress)
    write_file(runs / run.name / "config.yaml", [dump_run(run).encode()])
    return path, run


# ---- checkpoint -> Hugging Face ----


@dataclass(frozen=True)
class Export:
    """How a model is to be written; `context` is the longest sequence it is meant for.

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
    wanted = (*pieces(family_rules(family), plan.written), *copies(family_copies(family), plan.written))
    _check_source(source, plan.model)
    temporary = out.with_name(out.name + ".partial")
    if temporary.exists():
        remove_tree(temporary)
    make_directory(temporary)
    try:
        files = _write_weights(source, plan, wanted, temporary, progress)
        dtype = str(plan.dtype).removeprefix("torch.")
        _write_json(temporary / FILE, write_config(plan.written, family, plan.context, dtype))
        carried = carry_tokenizer(plan.tokenizer, temporary) if plan.tokenizer is not None else ()
        fsync_directory(temporary)
    except BaseException:
        remove_tree(temporary)
        raise
    rename(temporary, out)
    size = sum(nbytes(_dtype(piece, plan), piece.their_shape) for piece in wanted)
    return Converted(out, family, len(wanted), size, (FILE, *files, *carried), _notes(plan))


def _check_source(source: TensorSource, model: ModelConfig) -> None:
    """The checkpoint must hold exactly this model's tensors: with the check for HF tensors."""
    keys = weight_keys(model)
    wanted = [Piece(s.name, (), s.shape, keys[s.name], parse_dims("", len(s.shape))) for s in tensors_of(model)]
    found = {name: Entry(NAMES.get(source.dtype(name), "?"), source.shape(name), 0, 0) for name in source.names()}
    check_tensors(wanted, found)


def _write_weights(
    source: TensorSource, plan: Export, wanted: Sequence[Piece], folder: Path, progress: Progress | None
) -> tuple[str, ...]:
    shards = list(_shards(wanted, plan))
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    keys = weight_keys(plan.model)
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, _shard_bytes(source, plan, shard, keys, progress))
    if len(shards) == 1:
        return (SINGLE,)
    size = sum(nbytes(_dtype(piece, plan), piece.their_shape) for piece in wanted)
    weight_map = {piece.theirs: name for name, shard in zip(names, shards, strict=True) for piece in shard}
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return (*names, INDEX)


def _shards(wanted: Sequence[Piece], plan: Export) -> Iterator[list[Piece]]:
    """In the order of moefold's tensors; no shard is larger than ``max_shard``, except of one tensor."""
    shard: list[Piece] = []
    size = 0
    for piece in wanted:
        more = nbytes(_dtype(piece, plan), piece.their_shape)
        if shard and size + more > plan.max_shard:
            yield shard
            shard, size = [], 0
        shard.append(piece)
        size += more
    yield shard


def _shard_bytes(
    source: TensorSource, plan: Export, shard: Sequence[Piece], keys: dict[str, str], progress: Progress | None
) -> Iterator[bytes | memoryview]:
    yield header((piece.theirs, _dtype(piece, plan), piece.their_shape) for piece in shard)
    for piece in chain.from_iterable(whole.split() for whole in shard):
        theirs = piece.to_theirs(source.read(keys[piece.ours], piece.box)).to(_dtype(piece, plan))
        yield as_bytes(theirs)
        if progress is not None:
            progress(theirs.nbytes)


def _dtype(piece: Piece, plan: Export) -> torch.dtype:
    """The loss-free bias moves by a thousandth a step, so it stays in float32 where the weights are narrower."""
    is_bias = piece.ours.endswith(".expert_bias")
    return torch.promote_types(plan.dtype, torch.float32) if is_bias else plan.dtype


def _notes(plan: Export) -> tuple[str, ...]:
    notes = []
    if plan.model.moe is not None and plan.model.moe.capacity is not None:
        notes.append("trained with a capacity; transformers computes every chosen token")
    if plan.written != plan.model:
        notes.append(f"left out {plan.model.num_mtp} modules that look ahead")
    return tuple(notes)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    write_file(path, [(json.dumps(data, indent=2) + "\n").encode()])
