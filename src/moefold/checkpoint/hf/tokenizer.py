"""The files that turn text into tokens travel with the weights: copied by an allow-list, never opened or run."""

from __future__ import annotations

import os
from pathlib import Path

from moefold.checkpoint.files import make_directory, write_file
from moefold.checkpoint.hf.strict_json import open_plain

# Text and tables. Python files, pickles and whatever else lies in the directory stay behind.
CARRIED = (
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
_MOST_BYTES = 256 << 20


def carry_tokenizer(source: Path, target: Path) -> tuple[str, ...]:
    """Copy what is there; returns the names of the copies."""
    found = [name for name in CARRIED if (source / name).is_file() and not (source / name).is_symlink()]
    for name in found:
        with os.fdopen(open_plain(source / name), "rb") as file:
            content = file.read(_MOST_BYTES)
        make_directory(target)
        write_file(target / name, [content])
    return tuple(found)
