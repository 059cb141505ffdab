"""Files of the Hugging Face Hub by name: tokenizers, datasets and models, through huggingface_hub and its cache.

`hf://ORG/NAME`, or `ORG/NAME` where no such path exists, with `@REVISION` if it is not the newest. What was fetched
stays in huggingface_hub's cache, whose settings are honoured (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE): a second
use without a network reads the cache. Only files are fetched; code of a repository is never run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from moefold.errors import BackendError, DataError
from moefold.ops.engines import load_engine

PREFIX = "hf://"
RepoType = Literal["model", "dataset"]
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "chat_template*", "added_tokens.json", "vocab.json", "merges.txt"),
    *("*.model", "config.json"),
)
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors", "*.json")
DATA_FILES = tuple(f"*{ending}" for ending in (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt"))
_FILES = (".json", ".jsonl", ".ndjson", ".gz", ".zst", ".parquet", ".txt", ".md", ".csv")
_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}(@[\w./-]{1,96})?")


def is_hub_name(name: str) -> bool:
    """`hf://...`, or ORG/NAME where there is neither such a path nor a folder ORG, and NAME is not a file's."""
    if name.startswith(PREFIX):
        return True
    looks_local = os.path.exists(name.partition("/")[0]) or name.endswith(_FILES)
    return _NAME.fullmatch(name) is not None and not looks_local


def hub_folder(name: str, kind: RepoType, patterns: Sequence[str]) -> str:
    """The folder in the cache that holds the files of a repository that match."""
    repo, _, revision = name.removeprefix(PREFIX).removeprefix("datasets/").partition("@")
    if not _NAME.fullmatch(repo):
        raise DataError(f"{name}: is not hf://ORG/NAME")
    try:
        library = load_engine("huggingface_hub")
    except BackendError as error:
        raise DataError(f"{name}: is no path here, and the Hub needs {error}") from error
    try:
        folder = library.snapshot_download(
            repo, repo_type=kind, revision=revision or None, allow_patterns=list(patterns)
        )
    except Exception as error:  # the library has exceptions of its own and of its HTTP client
        said = " ".join(str(error).split())
        raise DataError(
            f"{name}: there is no such path here, and the Hub has no such {kind} or cannot be reached: {said[:300]}"
        ) from error
    if not any(names for _, _, names in os.walk(folder)):
        raise DataError(f"{name}: the {kind} has no file like {', '.join(patterns)}")
    return str(folder)


def local_tokenizer(name: str) -> str:
    """The path of a tokenizer, fetched if the name is one of the Hub."""
    return hub_folder(name, "model", TOKENIZER_FILES) if is_hub_name(name) else name


def local_model(name: str) -> str:
    """The folder of a model with its weights and tokenizer."""
    return _without_links(Path(hub_folder(name, "model", MODEL_FILES))) if is_hub_name(name) else name


def _without_links(snapshot: Path) -> str:
    """The same files as hard links: a snapshot is made of symbolic ones, which the readers of weights refuse."""
    target = snapshot.parent.parent / "hard_links" / snapshot.name
    try:
        for path in snapshot.rglob("*"):
            linked = target / path.relative_to(snapshot)
            if path.is_file() and not linked.exists():
                linked.parent.mkdir(parents=True, exist_ok=True)
                os.link(path.resolve(), linked)
    except FileExistsError:
        # Another process was faster with this file; whatever is missing is linked now.
        return _without_links(snapshot)
    except OSError as error:
        fix = f"use `hf download --local-dir`, and the folder that it makes ({error.strerror})"
        raise DataError(f"{snapshot}: its files cannot be linked beside it; {fix}") from error
    return str(target)


def local_data(name: str) -> str:
    return hub_folder(name, "dataset", DATA_FILES) if is_hub_name(name) else name
