"""A directory that `save_pretrained` wrote, of unknown origin.

Nothing in it is executed and nothing outside of it is opened: config.json is read by our own tables, the index may name
only regular files in the directory, pickles (.bin, .pt) are not read. The headers alone show whether the directory has
exactly the tensors that the model needs; this is checked before a tensor is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from moefold.blueprint.parameters import buffers, is_mtp, parameters
from moefold.checkpoint.hf.config_maps import family_copies, family_rules
from moefold.checkpoint.hf.hf_config import FILE, HfConfig, read_config
from moefold.checkpoint.hf.name_rules import HfTensor, hf_copies, hf_tensors, tensors_of
from moefold.checkpoint.hf.quantized_tensors import join_parts
from moefold.checkpoint.hf.untrusted_files import WEIGHT_DTYPES, HeaderEntry, SafetensorsFile, read_object
from moefold.checkpoint.tensor_spec import Box
from moefold.config.model import ModelConfig
from moefold.errors import ConversionError, Problem

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_INDEX_BYTES = 64 << 20
_MAX_PROBLEMS = 40
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")


def weight_keys(model: ModelConfig) -> dict[str, str]:
    """The name in a checkpoint of each tensor of a model: "parameter/" or "buffer/" and its own."""
    trained = {spec.name: f"parameter/{spec.name}" for spec in parameters(model)}
    return trained | {spec.name: f"buffer/{spec.name}" for spec in buffers(model)}


class HfDirectory:
    """An opened and checked directory: a `TensorSource` of moefold tensors, made from HF tensors when they are read."""

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        """``dtype`` of the parameters that are read; None is float32, or float64 if that is stored."""
        if not path.is_dir():
            raise ConversionError(
                Problem(str(path), "is not a directory", "give one with config.json and safetensors files")
            )
        if not os.path.lexists(path / FILE):
            raise ConversionError(Problem(str(path), f"has no {FILE}", "give a directory that save_pretrained wrote"))
        self.path = path
        self.config: HfConfig = read_config(read_object(path / FILE))
        self.notes: tuple[str, ...] = ()
        self._files = _open_files(path)
        try:
            stored = {name: file.entries[name] for name, file in self._files.items()}
            found, self._parts = join_parts(stored, self.config.quantization)
            if self._parts:
                self.notes = (f"dequantized {len(self._parts)} tensors: {self.config.quantization}",)
            self.hf_tensors = self._expected_tensors(found)
            copies = self._check_copies(found)
            others = {name: entry for name, entry in found.items() if name not in copies}
            self.skipped = check_tensors(self.hf_tensors, others, self.config.extra_prefixes)
            # Copies for MTP modules are expected; a stored copy of a tied head is reported.
            self.skipped += tuple(name for name in copies if name == _HEAD)
        except BaseException:
            self.close()
            raise
        self._dtypes = {
            hf_tensor.hf_name: WEIGHT_DTYPES[found[hf_tensor.hf_name].dtype] for hf_tensor in self.hf_tensors
        }
        self._dtype = dtype or torch.promote_types(torch.float32, max(self._dtypes.values(), key=lambda d: d.itemsize))
        self._by_key: dict[str, list[HfTensor]] = {key: [] for key in weight_keys(self.config.model).values()}
        keys = weight_keys(self.config.model)
        for hf_tensor in self.hf_tensors:
            self._by_key[keys[hf_tensor.moefold_name]].append(hf_tensor)
        self._shapes = {keys[spec.name]: spec.shape for spec in tensors_of(self.config.model)}

    def _expected_tensors(self, found: Mapping[str, HeaderEntry]) -> tuple[HfTensor, ...]:
        """The HF tensors of the model, without MTP modules if the files have none of their tensors.

        transformers does not save MTP modules, but its config.json still counts them.
        """
        model, rules = self.config.model, family_rules(self.config.model_type)
        expected = hf_tensors(rules, model)
        mtp = [hf_tensor.hf_name for hf_tensor in expected if is_mtp(hf_tensor.moefold_name)]
        if not mtp or any(name in found for name in mtp):
            return expected
        self.config = replace(self.config, model=replace(model, num_mtp=0))
        says = f"{FILE} says num_nextn_predict_layers = {model.num_mtp}"
        self.notes += (f"{says}, but the files have no tensor of such a layer: imported with model.num_mtp = 0",)
        return hf_tensors(rules, self.config.model)

    def _check_copies(self, found: Mapping[str, HeaderEntry]) -> frozenset[str]:
        """Names of tensors that are copies of others; raises if a copy differs."""
        copies = set()
        for name, original, because in self._possible_copies():
            if name in found and original in found:
                if not self._same_bytes(found, name, original):
                    raise ConversionError(Problem(name, f"is not equal to {original}, although {because}"))
                copies.add(name)
        return frozenset(copies)

    def _possible_copies(self) -> Iterator[tuple[str, str, str]]:
        """(name, original, why they are equal): a tied head may be stored, and MTP modules are stored with copies."""
        model = self.config.model
        if model.tied_embeddings:
            yield _HEAD, _EMBEDDING, f"{FILE} says tie_word_embeddings"
        for copy in hf_copies(family_copies(self.config.model_type), model):
            original = next(
                hf_tensor.hf_name for hf_tensor in self.hf_tensors if hf_tensor.moefold_name == copy.moefold_name
            )
            yield copy.hf_name, original, "MTP modules share it with the model"

    def _same_bytes(self, found: Mapping[str, HeaderEntry], name: str, other: str) -> bool:
        same_type = found[name].shape == found[other].shape and found[name].dtype == found[other].dtype
        chunks = zip(self._files[name].raw(name), self._files[other].raw(other), strict=True)
        return same_type and all(a == b for a, b in chunks)

    def names(self) -> Sequence[str]:
        return tuple(self._by_key)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        # The loss-free bias moves by small steps and must not be rounded.
        return torch.promote_types(self._dtype, torch.float32) if name.startswith("buffer/") else self._dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Needs memory for the result and one HF tensor (one expert of a stack)."""
        sources, dtype = self._by_key[name], self.dtype(name)
        if (
            len(sources) == 1
            and not any(len(group) > 1 for group in sources[0].dims.groups)
            and len(self.shape(name)) < 3
        ):
            out = sources[0].from_hf(self._read(sources[0])).to(dtype)
            return out if box is None else out[box]
        out = torch.empty(self.shape(name), dtype=dtype)
        for hf_tensor in chain.from_iterable(whole.split() for whole in sources):
            out[hf_tensor.index].copy_(hf_tensor.from_hf(self._read(hf_tensor)))
        return out if box is None else out[box]

    def _read(self, hf_tensor: HfTensor) -> Tensor:
        name, at = hf_tensor.hf_name, hf_tensor.hf_index
        return self._parts[name].read(self._read_stored, at) if name in self._parts else self._read_stored(name, at)

    def _read_stored(self, name: str, at: tuple[int, ...]) -> Tensor:
        return self._files[name].read(name, at)

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) * self.dtype(name).itemsize for name, shape in self._shapes.items())

    def close(self) -> None:
        _close(self._files)


def check_tensors(
    expected: Sequence[HfTensor], found: Mapping[str, HeaderEntry], extra_prefixes: Sequence[str] = ()
) -> tuple[str, ...]:
    """Raise with all tensors that are missing, unexpected, or of a wrong shape or dtype.

    Returns the names of tensors that are not part of the model and will be skipped.
    """
    problems = []
    for hf_tensor in expected:
        entry = found.get(hf_tensor.hf_name)
        if entry is None:
            problems.append(Problem(hf_tensor.hf_name, f"is missing; it would be {_moefold_slice(hf_tensor)}"))
        elif entry.shape != hf_tensor.hf_shape:
            problems.append(Problem(hf_tensor.hf_name, f"has shape {entry.shape}, not {hf_tensor.hf_shape}"))
        elif entry.dtype not in WEIGHT_DTYPES:
            problems.append(
                Problem(hf_tensor.hf_name, f"is {entry.dtype}", f"weights are one of {', '.join(WEIGHT_DTYPES)}")
            )
    names = {hf_tensor.hf_name for hf_tensor in expected}
    unexpected = [name for name in found if name not in names]
    skipped = tuple(name for name in unexpected if name.startswith(tuple(extra_prefixes)))
    problems += [Problem(name, "no tensor of this model has this name") for name in unexpected if name not in skipped]
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        rest = [Problem("...", f"and {more} more tensors")] if more > 0 else []
        raise ConversionError(*problems[:_MAX_PROBLEMS], *rest)
    return skipped


def _moefold_slice(hf_tensor: HfTensor) -> str:
    return f"{hf_tensor.moefold_name}{list(hf_tensor.index)}" if hf_tensor.index else hf_tensor.moefold_name


def _open_files(path: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> its file; all files are open and their headers checked."""
    if (path / INDEX).exists() or (path / INDEX).is_symlink():
        return _open_indexed(path)
    if not (path / SINGLE).exists() and not (path / SINGLE).is_symlink():
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".pkl"))
        fix = f"{pickles[0]} is a pickle and is never opened; save it again as safetensors" if pickles else ""
        raise ConversionError(Problem(str(path), f"has neither {SINGLE} nor {INDEX}", fix))
    file = SafetensorsFile(path / SINGLE)
    return dict.fromkeys(file.entries, file) if file.entries else _refuse_empty(file)


def _refuse_empty(file: SafetensorsFile) -> dict[str, SafetensorsFile]:
    file.close()
    raise ConversionError(Problem(file.path.name, "has no tensors"))


def _open_indexed(path: Path) -> dict[str, SafetensorsFile]:
    weight_map = read_object(path / INDEX, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(Problem(f"{INDEX}: weight_map", "must have a file for every tensor"))
    wrong = [name for name, file in weight_map.items() if not (isinstance(file, str) and _PLAIN_NAME.fullmatch(file))]
    if wrong:
        fix = "use the name of a file in the same directory"
        raise ConversionError(
            *(
                Problem(f"{INDEX}: {name[:80]}", f"{str(weight_map[name])[:80]!r} is not a file name", fix)
                for name in wrong[:20]
            )
        )
    opened: dict[str, SafetensorsFile] = {}
    try:
        for name in dict.fromkeys(weight_map.values()):
            opened[name] = SafetensorsFile(path / name)
        _check_index(weight_map, opened)
    except BaseException:
        _close(opened)
        raise
    return {name: opened[file] for name, file in weight_map.items()}


def _check_index(weight_map: Mapping[str, str], opened: Mapping[str, SafetensorsFile]) -> None:
    problems = [
        Problem(name[:80], f"is not in {file}, where the index has it")
        for name, file in weight_map.items()
        if name not in opened[file].entries
    ]
    problems += [
        Problem(name[:80], f"is in {file}, where the index does not have it")
        for file, tensors in opened.items()
        for name in tensors.entries
        if weight_map.get(name) != file
    ]
    if problems:
        raise ConversionError(*problems[:_MAX_PROBLEMS])


def _close(files: Mapping[str, SafetensorsFile]) -> None:
    for file in set(files.values()):
        file.close()
