"""Small token files for tests of the data layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moefold.data.token_writers import ArrayWriter, MegatronWriter


def documents(count: int, seed: int = 0, vocab: int = 256, longest: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab, rng.integers(1, longest)) for _ in range(count)]


def megatron(prefix: Path, docs: list[np.ndarray], dtype: str = "uint16", masks: list[np.ndarray] | None = None) -> str:
    with MegatronWriter(str(prefix), dtype, overwrite=True, with_loss_mask=masks is not None) as writer:
        for number, document in enumerate(docs):
            writer.add(document, None if masks is None else masks[number])
    return str(prefix)


def raw(path: Path, docs: list[np.ndarray], dtype: str = "uint16") -> str:
    with ArrayWriter(str(path), dtype, overwrite=True) as writer:
        for document in docs:
            writer.add(document)
    return str(writer.targets[0])
