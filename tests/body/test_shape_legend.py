"""A tensor's name says its shape: every letter is in docs/shapes.md, and the sizes are what the letters say.

The second test runs a small MoE decoder forward and backward in which every dim has another size, looks at the local
variables of moefold's functions as they return, and compares each tensor's shape with the suffix of its name.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from torch import Tensor

from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.model.build import build_decoder, local_interfaces

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/moefold"
BODY = ("ops", "comm", "nn", "attention", "moe", "model", "parallel", "pipeline")
SUFFIX = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*_((?=[A-Za-z123]*[A-Z])[A-Za-z123]+|[te])")

# "N tokens of ..., K choices per token, ...": a legend in a docstring.
LEGEND_LINE = re.compile(r"^[A-Za-z] [a-z][^.,;]*, .*\b(?<!')[B-HJ-Zb-z] [a-z]+", re.MULTILINE)


def legend() -> set[str]:
    rows = [line for line in (ROOT / "docs/shapes.md").read_text().splitlines() if line.startswith("| `")]
    letters = [letter for row in rows for letter in re.findall(r"`(\w)`", row.split("|")[1])]
    assert len(letters) == len(set(letters)) > 30
    return set(letters)


def names_with_shapes(path: Path) -> Iterator[tuple[str, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME and (found := SUFFIX.fullmatch(token.string)):
            yield token.string, found[1]


def body_files() -> list[Path]:
    return [path for package in BODY for path in sorted((SOURCE / package).rglob("*.py"))]


def test_every_letter_is_in_the_legend() -> None:
    known, unknown = legend(), {}
    for path in body_files():
        if wrong := {name for name, letters in names_with_shapes(path) if not known.issuperset(letters)}:
            unknown[path.relative_to(SOURCE).as_posix()] = wrong
    assert unknown == {}


def test_no_file_has_a_legend_of_its_own() -> None:
    found = [
        path.relative_to(SOURCE).as_posix() for path in body_files() if LEGEND_LINE.search(_docstring(path.read_text()))
    ]
    assert not found, "\n".join(found)


def _docstring(text: str) -> str:
    return text.split('"""')[1] if text.startswith('"""') else ""


MOE = MoEConfig(num_experts=7, top_k=3, expert_hidden_dim=18, shared_hidden_dim=18, latent_dim=22, shared_gate=True)
MODEL = ModelConfig(
    vocab_size=43,
    dim=26,
    num_layers=2,
    num_dense_layers=1,
    dense_hidden_dim=18,
    attention=GQAConfig(num_heads=6, num_kv_heads=2, head_dim=10, qk_norm="head", sinks=True),
    moe=MOE,
)
SIZES = {"T": 34, "S": 34, "t": 34, "K": 3, "E": 7, "e": 7, "D": 26, "F": 18, "G": 36, "H": 6, "V": 43, "v": 43, "M": 1}
SIZES |= {"R": 34, "L": 22, "P": 34 * 3}
MODELS: dict[str, tuple[ModelConfig, dict[str, int]]] = {
    "gqa": (MODEL, {"J": 2, "C": 10, "U": 10}),
    "mla": (
        ModelConfig(
            vocab_size=43,
            dim=26,
            num_layers=2,
            num_dense_layers=1,
            dense_hidden_dim=18,
            attention=MLAConfig(num_heads=6, q_latent=14, kv_latent=16, nope_dim=8, rope_dim=4, value_dim=9),
            moe=MOE,
        ),
        # One key/value head per query head; torch's kernels are given values that are padded to the keys' dim.
        {"J": 6, "C": 12, "q": 14, "k": 16},
    ),
}


@pytest.mark.parametrize("backend", ["sequential", "fused"])
@pytest.mark.parametrize("kind", MODELS)
def test_shapes_are_what_names_say(kind: str, backend: str) -> None:
    model, more = MODELS[kind]
    sizes, wrong, seen = SIZES | more, set(), set()
    if backend == "fused":
        # Rounded up to blocks, which depends on the routing.
        sizes = {letter: size for letter, size in sizes.items() if letter != "P"}

    def look(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "return" or "moefold" not in file:
            return
        for name, value in frame.f_locals.items():
            found = SUFFIX.fullmatch(name)
            if found is None or not isinstance(value, Tensor):
                continue
            place = Path(file).relative_to(SOURCE).as_posix()
            seen.add(name)
            if not _fits(value, found[1], sizes):
                wrong.add(f"{place}: {frame.f_code.co_name}: {name} is {list(value.shape)}")

    decoder = build_decoder(model, torch.float64, local_interfaces(backend)).double()
    fill(decoder)
    batch = batch_of(2, 17, 43)
    sys.setprofile(look)
    try:
        output = decoder(batch)
        assert output.loss_sum is not None
        output.loss_sum.backward()
    finally:
        sys.setprofile(None)
    assert not wrong, "\n".join(sorted(wrong))
    assert len(seen) > 40


def _fits(value: Tensor, letters: str, sizes: dict[str, int]) -> bool:
    if value.ndim != len(letters):
        return False
    known = {**sizes, "1": 1, "2": 2, "3": 3}
    return all(known.get(letter, size) == size for letter, size in zip(letters, value.shape, strict=True))
