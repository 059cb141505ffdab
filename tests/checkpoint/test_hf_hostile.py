"""Twenty thousand damaged and malicious directories: typed errors only, and nothing that lies is believed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.test_hf_refusals import CONFIG, good_tensors, write_directory

from moefold.checkpoint.hf.config_keys import IGNORED_KEYS
from moefold.checkpoint.hf.hf_config import read_config
from moefold.checkpoint.hf.hf_directory import INDEX, SINGLE, HfDirectory
from moefold.checkpoint.hf.untrusted_files import ITEM_SIZES, MAX_HEADER, SafetensorsFile, parse_header
from moefold.errors import ConversionError

HEADERS, CONFIGS, FILES, DIRECTORIES = 16_000, 2_400, 1_200, 400
NASTY: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**400,
    1.5,
    1e308,
    "",
    "F32",
    "../x",
    "\0",
    "\ud800",
    [],
    [0],
)
NASTY += ([1, 2], [-1, 4], [2**62, 2**62, 16], [[1]], {}, {"a": {}}, "x" * 5000, [0] * 100)
ENTRIES = {
    "embed": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
    "empty": {"dtype": "F16", "shape": [0, 3], "data_offsets": [128, 128]},
    "gate": {"dtype": "BF16", "shape": [2, 3, 4], "data_offsets": [128, 176]},
    "one": {"dtype": "F64", "shape": [], "data_offsets": [176, 184]},
}
DATA = 184


def outcome(read: Callable[[], Any]) -> bool:
    """Whether it was accepted; anything but an answer or our own error fails the test."""
    try:
        read()
    except ConversionError as error:
        assert error.problems and all(problem.path and len(str(problem)) < 2000 for problem in error.problems)
        return False
    return True


def mutated_tree(value: Any, rng: random.Random) -> Any:
    """One change somewhere in a tree of JSON: a value replaced, a key lost, added or renamed."""
    copy = json.loads(json.dumps(value))
    node, steps = copy, rng.randrange(1, 4)
    for _ in range(steps):
        inner = [v for v in (node.values() if isinstance(node, dict) else node) if isinstance(v, dict | list) and v]
        if not inner or rng.random() < 0.3:
            break
        node = rng.choice(inner)
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = rng.choice(keys)
    action = rng.randrange(4)
    if action == 0 and isinstance(node, dict):
        node[rng.choice(("extra", "dtype", "", "a" * 600, "\n", "__metadata__"))] = rng.choice(NASTY)
    elif action == 1:
        del node[key]
    elif action == 2 and isinstance(node[key], int) and not isinstance(node[key], bool):
        node[key] += rng.choice((-8, -1, 1, 8, 128, 2**40))
    else:
        node[key] = rng.choice(NASTY)
    return copy


def mutated_bytes(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    at = rng.randrange(len(data))
    action = rng.randrange(5)
    if action == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif action == 1:
        del data[at : at + rng.randrange(1, 20)]
    elif action == 2:
        data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 20)))
    elif action == 3:
        data[at:at] = rng.choice(
            (b"[" * 5000, b'{"a":' * 3000, b"9" * 5000, b"NaN", b"Infinity", b"\xff\xfe", b"\0" * 9)
        )
    else:
        other = rng.randrange(len(data))
        data[at : at + 8] = data[other : other + 8]
    return bytes(data)


def test_headers_are_believed_only_if_they_fit_their_file() -> None:
    rng = random.Random(1)
    good = json.dumps(ENTRIES).encode()
    assert len(parse_header(good, DATA, "f")) == 4
    accepted = 0
    for number in range(HEADERS):
        raw = mutated_bytes(good, rng) if number % 2 else json.dumps(mutated_tree(ENTRIES, rng)).encode()
        size = DATA if rng.random() < 0.9 else rng.choice((0, DATA - 1, DATA + 1, 2**50))
        found: dict[str, Any] = {}
        if outcome(lambda raw=raw, size=size, found=found: found.update(parse_header(raw, size, "f"))):
            accepted += 1
            spans = sorted((entry.start, entry.stop) for entry in found.values())
            assert sum(stop - start for start, stop in spans) == size
            assert all(a[1] == b[0] for a, b in pairwise(spans)) and spans[0][0] == 0
            assert all(entry.dtype in ITEM_SIZES for entry in found.values())
    # Renamed tensors and reordered equal widths are still good files; nearly everything else is not.
    assert accepted < 0.25 * HEADERS


def test_configs_are_read_whole_or_not_at_all() -> None:
    rng = random.Random(2)
    telling = {key: value for key, value in CONFIG.items() if key not in IGNORED_KEYS or key == "model_type"}
    accepted = 0
    for _ in range(CONFIGS):
        config = mutated_tree(telling, rng)
        accepted += outcome(lambda config=config: read_config(config))
    # A key less where there is a default, or another size: the tensors' shapes will have the last word.
    assert accepted < 0.4 * CONFIGS, accepted


def test_files_with_wrong_lengths_are_refused(tmp_path: Path) -> None:
    rng = random.Random(3)
    directory = write_directory(tmp_path / "hf", good_tensors())
    good = (directory / SINGLE).read_bytes()
    head = int.from_bytes(good[:8], "little")
    path = tmp_path / "f.safetensors"
    for number in range(FILES):
        kind = number % 4
        if kind == 0:
            data = rng.choice((0, 1, head - 1, head + 1, len(good), MAX_HEADER + 1, 2**63, 2**64 - 1)).to_bytes(
                8, "little"
            )
            data += good[8:]
        elif kind == 1:
            data = good[: rng.randrange(len(good))]
        elif kind == 2:
            data = good + bytes(rng.randrange(1, 100))
        else:
            data = good[:8] + mutated_bytes(good[8 : 8 + head], rng)[:head].ljust(head) + good[8 + head :]
        path.write_bytes(data)
        opened: list[SafetensorsFile] = []
        accepted = outcome(lambda opened=opened: opened.append(SafetensorsFile(path)))
        # A flipped bit in a tensor's name makes another good file; whether the name is right is asked later.
        assert not accepted or kind == 3
        for file in opened:
            file.close()


def test_directories_are_opened_whole_or_not_at_all(tmp_path: Path) -> None:
    rng = random.Random(4)
    tensors = good_tensors()
    names = list(tensors)
    directory = write_directory(tmp_path / "hf", tensors)
    half = len(names) // 2
    for part, chosen in (("a", names[:half]), ("b", names[half:])):
        write_directory(tmp_path / part, {name: tensors[name] for name in chosen})
        (tmp_path / part / SINGLE).rename(directory / f"{part}.safetensors")
    (directory / SINGLE).unlink()
    index = {
        "metadata": {},
        "weight_map": {name: f"{'a' if i < half else 'b'}.safetensors" for i, name in enumerate(names)},
    }
    (directory / INDEX).write_text(json.dumps(index))
    HfDirectory(directory).close()
    for number in range(DIRECTORIES):
        changed = mutated_tree(index["weight_map"], rng)
        same = changed == index["weight_map"]
        if number % 4 == 0:
            name = rng.choice(names)
            changed = {
                **index["weight_map"],
                name: rng.choice(("b.safetensors", "a.safetensors", "../b.safetensors", "c")),
            }
            same = changed == index["weight_map"]
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": changed}))
        assert outcome(lambda: HfDirectory(directory).close()) == same


def test_a_header_of_a_hundred_megabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    with open(path, "wb") as file:
        file.write((100 << 20).to_bytes(8, "little"))
        file.truncate(200 << 20)  # sparse
    with pytest.raises(ConversionError, match="a header of 104857600 bytes; at most 67108864 are possible"):
        SafetensorsFile(path)


def test_the_count_is_what_was_promised() -> None:
    assert HEADERS + CONFIGS + FILES + DIRECTORIES == 20_000
