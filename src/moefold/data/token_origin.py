"""What token files were made of: `PREFIX.origin.json`, which `moefold tokenize` writes beside them.

Tokens are numbers; what they mean lies in a tokenizer. A run must not mix two of them, nor have a smaller vocabulary
than its tokens, nor another tokenizer than the model that it continues. Files made by other programs have no origin,
and are checked by the vocabulary alone, token by token, when they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from moefold.config.data import BUILTIN, DataConfig
from moefold.config.run import RunConfig
from moefold.data.byte_ranges import exists, is_url, read_json
from moefold.data.sources import source_paths
from moefold.data.token_files import LOSS_MASK, ORIGIN
from moefold.errors import DataError, Problem

# A file of a few hundred bytes; more is something else.
_MAX_BYTES = 1 << 20
# What a run that predicts the next token may read; a preference pair holds an answer that must not be learned.
TRAINABLE = ("text", "chat")
PREFERENCE = ("preference",)


@dataclass(frozen=True)
class Origin:
    """``kind``: text, chat or preference. ``tokenizer`` is a name for people; its hash is compared, None for bytes."""

    kind: str
    tokenizer: str
    tokenizer_sha256: str | None
    vocab_size: int
    end_token: int | None = None
    loss_on: tuple[str, ...] = ()
    chat_template_sha256: str | None = None
    has_loss_mask: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def origin_path(path: str) -> str:
    """Beside a pair or an array, whichever of its files is given."""
    for ending in (".bin", ".idx", ".npy"):
        path = path.removesuffix(ending)
    return path + ORIGIN


def read_origin(path: str) -> Origin | None:
    """The origin of one token file, or None if it has none."""
    name = origin_path(path)
    found = read_json(name, _MAX_BYTES, "the origin", "tokenize again, or remove it")
    if found is None:
        return None
    known = {field.name for field in fields(Origin)}
    # Keys of later versions are left out; kinds and types are not.
    given = {key: value for key, value in found.items() if key in known} if isinstance(found, dict) else {}
    if not _is_origin(given):
        raise DataError(f"{name}: does not say kind, tokenizer and vocab_size; tokenize again, or remove it")
    origin = Origin(**{**given, "loss_on": tuple(given.get("loss_on", ()))})
    if origin.has_loss_mask and not exists(name.removesuffix(ORIGIN) + LOSS_MASK):
        raise DataError(
            f"{name.removesuffix(ORIGIN)}{LOSS_MASK}: is missing; copy it beside its tokens, or tokenize again"
        )
    return origin


def _is_origin(found: dict[str, object]) -> bool:
    strings = all(isinstance(found.get(key), str) for key in ("kind", "tokenizer"))
    hashed = found.get("tokenizer_sha256")
    return strings and isinstance(found.get("vocab_size"), int) and (hashed is None or isinstance(hashed, str))


def problems_of_run(run: RunConfig, only_here: bool = False) -> list[Problem]:
    """What the origins of a run's token files say against it: the same for `check` and before the first step."""
    if not run.data.sources and run.data.validation is None:
        return []
    kinds = TRAINABLE if run.train.dpo is None else PREFERENCE
    tokenizer = Path(run.train.directory) / run.name / "tokenizer"
    return origin_problems(run.data, run.model.vocab_size, tokenizer, kinds, only_here)


def origin_problems(
    data: DataConfig,
    vocab_size: int,
    tokenizer: Path | None = None,
    kinds: Sequence[str] = TRAINABLE,
    only_here: bool = False,
) -> list[Problem]:
    """What is wrong with a run's sources by their origins; ``tokenizer`` is the folder of the model's own, if any.

    ``only_here`` leaves out sources that this machine does not have, as one that only plans may not.
    """
    keys = [f"data.mixture.{number}.path" for number in range(len(data.mixture))] or ["data.train"]
    sources = [(key, source.path) for key, source in zip(keys, data.sources)]
    if data.validation is not None:
        sources.append(("data.validation", data.validation))
    found = [
        (key, path, origin)
        for key, source in sources
        if source != BUILTIN and (not only_here or _is_here(source))
        for path in source_paths(source)
        if (origin := read_origin(path)) is not None
    ]
    problems = [problem for key, path, origin in found for problem in _problems(key, path, origin, vocab_size, kinds)]
    problems += _model_problems(found, tokenizer)
    for key, path, origin in found[1:]:
        first = found[0]
        if origin.tokenizer_sha256 != first[2].tokenizer_sha256:
            message = f"{path} was made with {_name(origin)}, but {first[1]} ({first[0]}) with {_name(first[2])}"
            problems.append(Problem(key, message, "tokenize both with one tokenizer"))
    return problems


def _is_here(source: str) -> bool:
    return not is_url(source) and (os.path.exists(source) or os.path.exists(source + ".idx"))


def _problems(key: str, path: str, origin: Origin, vocab_size: int, kinds: Sequence[str]) -> list[Problem]:
    found = []
    if origin.kind not in kinds:
        message = f"{path} holds {origin.kind} data, and this run reads {' or '.join(kinds)}"
        found.append(Problem(key, message, "preference pairs are for DPO" if origin.kind == "preference" else ""))
    if origin.vocab_size > vocab_size:
        message = f"{path} was made with {_name(origin)}, of {origin.vocab_size:,} tokens; the model has {vocab_size:,}"
        fix = f"set model.vocab_size to {origin.vocab_size} or more, or tokenize with the model's tokenizer"
        found.append(Problem(key, message, fix))
    return found


def _model_problems(found: list[tuple[str, str, Origin]], tokenizer: Path | None) -> list[Problem]:
    """Tokens of another tokenizer than that of the model, whose files lie in the run's folder."""
    file = None if tokenizer is None else tokenizer / "tokenizer.json"
    if file is None or not file.is_file():
        return []
    ours = hashlib.sha256(file.read_bytes()).hexdigest()
    return [
        Problem(
            key, f"{path} was made with {_name(origin)}, not with the model's {file}", f"use --tokenizer {tokenizer}"
        )
        for key, path, origin in found
        if origin.tokenizer_sha256 != ours
    ]


def _name(origin: Origin) -> str:
    short = "" if origin.tokenizer_sha256 is None else f" ({origin.tokenizer_sha256[:8]})"
    return f"the tokenizer {origin.tokenizer}{short}"
