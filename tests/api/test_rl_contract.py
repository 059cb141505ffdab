"""The table of docs/rl.md of what NeMo-RL and slime call: every method that it names exists with these parameters."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from moefold.rl import Engine, Rollout

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"
# What a driver cannot do without: none of these may disappear from the table.
NEEDED = {"score", "train_step", "weights", "weight_buckets", "weight_specs", "release", "restore", "save", "load"}


def rows() -> list[tuple[str, str, str]]:
    found = re.findall(r"^\| (NeMo-RL|slime) \| (.*) \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    return [(framework, calls, answer) for framework, calls, answer in found]


def test_every_method_of_the_table_has_these_parameters() -> None:
    named: dict[str, set[str]] = {"NeMo-RL": set(), "slime": set()}
    for framework, calls, answer in rows():
        methods = re.findall(r"`(\w+)\(([\w, ]*)\)`", answer)
        assert methods or answer.startswith("nothing: "), (framework, calls, answer)
        for method, parameters in methods:
            assert hasattr(Engine, method), f"{framework} {calls}: there is no Engine.{method}"
            known = inspect.signature(getattr(Engine, method)).parameters
            unknown = [word for word in parameters.replace(",", " ").split() if word not in known]
            assert not unknown, f"Engine.{method} has no parameter {unknown}; it has {list(known)[1:]}"
            required = [
                word for word, each in known.items() if each.default is each.empty and each.kind is not each.VAR_KEYWORD
            ]
            assert set(required[1:]) <= set(parameters.replace(",", " ").split()), (method, required)
            named[framework].add(method)
        for attribute in re.findall(r"`Rollout\.(\w+)`", answer):
            assert attribute in inspect.signature(Rollout).parameters
    assert NEEDED - {"weights"} <= named["NeMo-RL"] and NEEDED - {"weight_specs"} <= named["slime"]


def test_a_call_is_answered_once() -> None:
    calls = [(framework, each) for framework, text, _ in rows() for each in re.findall(r"^`(\w+)", text)]
    assert len(rows()) >= 19 and len({*calls}) >= 16
