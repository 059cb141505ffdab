"""A directory that `save_pretrained` wrote, opened as the stranger's work it is.

Nothing in it is executed and nothing outside of it is opened: config.json is read by our own tables, the index may
name only plain files beside it, pickles (.bin, .pt) are not read at all. Which tensors are there, and whether they are
exactly those that the model needs, is settled from the headers alone, before the first number is read.
"""

from __future__ import annotations

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
from moefold.checkpoint.hf.hf_config import FILE, TheirConfig, read_config
from moefold.checkpoint.hf.name_rules import Piece, copies, pieces, tensors_of
from moefold.checkpoint.hf.safetensors_file import FORMATS, Entry, TensorFile
from moefold.checkpoint.hf.strict_json import read_object
from moefold.checkpoint.tensor_spec import Box
from moefold.config.model import ModelConfig
from moefold.errors import ConversionError, Problem

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_INDEX_BYTES = 64 << 20
_MOST_PROBLEMS = 40
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")


def weight_keys(model: ModelConfig) -> dict[str, str]:
    """How checkpoints call each tensor of a model: with what it is for in front."""
    trained = {spec.name: f"parameter/{spec.name}" for spec in parameters(model)}
    return trained | {spec.name: f"buffer/{spec.name}" for spec in buffers(model)}


class HfDirectory:
    """An opened and checked directory: a `TensorSource` of our tensors, made from theirs as they are asked for."""

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        """``dtype``: what parameters are read as; None for float32, or float64 if that is what is stored."""
        if not path.is_dir():
            raise ConversionError(Problem(str(path), "is not a directory"))
        self.path = path
        self.config: TheirConfig = read_config(read_object(path / FILE))
        self.notes: tuple[str, ...] = ()
        self._files = _open_files(path)
        try:
            found = {name: file.entries[name] for name, file in self._files.items()}
            self.pieces = self._wanted(found)
            repeated = self._repeated(found)
            others = {name: entry for name, entry in found.items() if name not in repeated}
            self.left_out = check_tensors(self.pieces, others, self.config.beside)
            # A module's copies belong there; a head that is stored where there should be none is worth a word.
            self.left_out += tuple(name for name in repeated if name == _HEAD)
        except BaseException:
            self.close()
            raise
        self._formats = {piece.theirs: FORMATS[found[piece.theirs].format] for piece in self.pieces}
        self._dtype = dtype or torch.promote_types(torch.float32, max(self._formats.values(), key=lambda d: d.itemsize))
        self._by_key: dict[str, list[Piece]] = {key: [] for key in weight_keys(self.config.model).values()}
        keys = weight_keys(self.config.model)
        for piece in self.pieces:
            self._by_key[keys[piece.ours]].append(piece)
        self._shapes = {keys[spec.name]: spec.shape for spec in tensors_of(self.config.model)}

    def _wanted(self, found: Mapping[str, Entry]) -> tuple[Piece, ...]:
        """The model's pieces; without the modules that look ahead, if none of their tensors is there.

        transformers saves none of them, but goes on saying that there are some.
        """
        model, rules = self.config.model, family_rules(self.config.model_type)
        wanted = pieces(rules, model)
        ahead = [piece.theirs for piece in wanted if is_mtp(piece.ours)]
        if not ahead or any(name in found for name in ahead):
            return wanted
        self.config = replace(self.config, model=replace(model, num_mtp=0))
        says = f"{FILE} says num_nextn_predict_layers = {model.num_mtp}"
        self.notes = (f"{says}, but no tensor of such a layer is there: imported with model.num_mtp = 0",)
        return pieces(rules, self.config.model)

    def _repeated(self, found: Mapping[str, Entry]) -> frozenset[str]:
        """Tensors that repeat another one; refused if they should and do not."""
        repeated = set()
        for name, original, because in self._repeatable():
            if name in found and original in found:
                if not self._equal(found, name, original):
                    raise ConversionError(Problem(name, f"is not {original}, though {because}"))
                repeated.add(name)
        return frozenset(repeated)

    def _repeatable(self) -> Iterator[tuple[str, str, str]]:
        """Some who tie the head to the embedding store it all the same; modules that look ahead come with copies."""
        model = self.config.model
        if model.tied_embeddings:
            yield _HEAD, _EMBEDDING, f"{FILE} says tie_word_embeddings"
        for copy in copies(family_copies(self.config.model_type), model):
            original = next(piece.theirs for piece in self.pieces if piece.ours == copy.ours)
            yield copy.theirs, original, "a module that looks ahead shares it with the model"

    def _equal(self, found: Mapping[str, Entry], name: str, other: str) -> bool:
        alike = found[name].shape == found[other].shape and found[name].format == found[other].format
        chunks = zip(self._files[name].raw(name), self._files[other].raw(other), strict=True)
        return alike and all(a == b for a, b in chunks)

    def names(self) -> Sequence[str]:
        return tuple(self._by_key)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        # A bias that moves by small steps must not be rounded.
        return torch.promote_types(self._dtype, torch.float32) if name.startswith("buffer/") else self._dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Beside the answer, no more than one of their tensors (one expert of a stack) is in memory."""
        mine, dtype = self._by_key[name], self.dtype(name)
        if len(mine) == 1 and not any(len(group) > 1 for group in mine[0].dims.groups) and len(self.shape(name)) < 3:
            out = mine[0].to_ours(self._read(mine[0])).to(dtype)
            return out if box is None else out[box]
        out = torch.empty(self.shape(name), dtype=dtype)
        for piece in chain.from_iterable(whole.split() for whole in mine):
            out[piece.at].copy_(piece.to_ours(self._read(piece)))
        return out if box is None else out[box]

    def _read(self, piece: Piece) -> Tensor:
        return self._files[piece.theirs].read(piece.theirs, piece.their_at)

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) * self.dtype(name).itemsize for name, shape in self._shapes.items())

    def close(self) -> None:
        _close(self._files)


def check_tensors(wanted: Sequence[Piece], found: Mapping[str, Entry], beside: Sequence[str] = ()) -> tuple[str, ...]:
    """Every tensor that is missing, too many, misshaped or of a type that cannot be a weight, all at once.

    Returns the names that are beside the model and will be left out.
    """
    problems = []
    for piece in wanted:
        entry = found.get(piece.theirs)
        if entry is None:
            problems.append(Problem(piece.theirs, f"is missing; it would be {_place(piece)}"))
        elif entry.shape != piece.their_shape:
            problems.append(Problem(piece.theirs, f"has shape {entry.shape}, not {piece.their_shape}"))
        elif entry.format not in FORMATS:
            problems.append(Problem(piece.theirs, f"is {entry.format}", f"weights are one of {', '.join(FORMATS)}"))
    names = {piece.theirs for piece in wanted}
    extra = [name for name in found if name not in names]
    left_out = tuple(name for name in extra if name.startswith(tuple(beside)))
    problems += [Problem(name, "no tensor of this model has this name") for name in extra if name not in left_out]
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        rest = [Problem("...", f"and {more} more tensors")] if more > 0 else []
        raise ConversionError(*problems[:_MOST_PROBLEMS], *rest)
    return left_out


def _place(piece: Piece) -> str:
    return f"{piece.ours}{list(piece.at)}" if piece.at else piece.ours


def _open_files(path: Path) -> dict[str, TensorFile]:
    """Which file each tensor is in; all of them open, with their headers checked."""
    if (path / INDEX).exists() or (path / INDEX).is_symlink():
        return _open_indexed(path)
    if not (path / SINGLE).exists() and not (path / SINGLE).is_symlink():
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".pkl"))
        fix = f"{pickles[0]} is a pickle and is never opened; save it again as safetensors" if pickles else ""
        raise ConversionError(Problem(str(path), f"has neither {SINGLE} nor {INDEX}", fix))
    file = TensorFile(path / SINGLE)
    return dict.fromkeys(file.entries, file) if file.entries else _nothing(file)


def _nothing(file: TensorFile) -> dict[str, TensorFile]:
    file.close()
    raise ConversionError(Problem(file.path.name, "holds no tensors"))


def _open_indexed(path: Path) -> dict[str, TensorFile]:
    weight_map = read_object(path / INDEX, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(Problem(f"{INDEX}: weight_map", "must name a file for every tensor"))
    wrong = [name for name, file in weight_map.items() if not (isinstance(file, str) and _PLAIN_NAME.fullmatch(file))]
    if wrong:
        fix = "a file beside the index, by its bare name"
        raise ConversionError(
            *(
                Problem(f"{INDEX}: {name[:80]}", f"{str(weight_map[name])[:80]!r} is not a file name", fix)
                for name in wrong[:20]
            )
        )
    opened: dict[str, TensorFile] = {}
    try:
        for name in dict.fromkeys(weight_map.values()):
            opened[name] = TensorFile(path / name)
        _check_index(weight_map, opened)
    except BaseException:
        _close(opened)
        raise
    return {name: opened[file] for name, file in weight_map.items()}


def _check_index(weight_map: Mapping[str, str], opened: Mapping[str, TensorFile]) -> None:
    problems = [
        Problem(name[:80], f"the index says it is in {file}, but it is not")
        for name, file in weight_map.items()
        if name not in opened[file].entries
    ]
    problems += [
        Problem(name[:80], f"is in {file}, but not according to the index")
        for file, tensors in opened.items()
        for name in tensors.entries
        if weight_map.get(name) != file
    ]
    if problems:
        raise ConversionError(*problems[:_MOST_PROBLEMS])


def _close(files: Mapping[str, TensorFile]) -> None:
    for file in set(files.values()):
        file.close()
