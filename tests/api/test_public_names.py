"""`import moefold`: light, complete, typed, documented; every example in a docstring runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moefold
from moefold.cli.api_reference import reference

ROOT = Path(__file__).parents[2]


def in_a_new_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timing
def test_importing_moefold_is_light() -> None:
    """In CPU time of the process, which a busy machine does not change: 0.2 s with the interpreter's own start."""
    out = in_a_new_process(
        "import sys, time, moefold\n"
        "moefold.__all__\n"
        "print(time.process_time(), *({'torch', 'numpy', 'pydantic', 'yaml', 'rich'} & set(sys.modules)))"
    )
    seconds, *heavy = out.split()
    assert float(seconds) < 0.2 and heavy == []


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, moefold\n"
        "run = moefold.load_run('debug_tiny')\n"
        "moefold.check(run, world=2), moefold.plan(run, gpus=2, search=False), moefold.Callback, moefold.Trainer\n"
        "print('torch' in sys.modules)"
    )
    assert in_a_new_process(code) == "False\n"


@pytest.mark.slow
def test_packages_do_not_replace_functions_of_their_name() -> None:
    code = (
        "import moefold.plan.predict, moefold.prove.cases\n"
        "from moefold.plan.search import proposal\n"
        "import moefold\n"
        "from moefold import plan\n"
        "assert plan is moefold.plan\n"
        "print(moefold.plan.__module__, moefold.prove.__module__, proposal.__name__)"
    )
    assert in_a_new_process(code) == "moefold.api.plans moefold.api.proofs moefold.plan.search.proposal\n"


def test_every_name_is_there_and_no_other() -> None:
    assert len(set(moefold.__all__)) == len(moefold.__all__)
    assert set(moefold.__all__) <= set(dir(moefold))
    for name in moefold.__all__:
        assert getattr(moefold, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = moefold.nothing  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse((ROOT / "src" / "moefold" / "__init__.pyi").read_text())
    typed = {
        (alias.asname, node.module)
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {(name, getattr(moefold, name).__module__) for name in moefold.__all__}


@pytest.mark.parametrize("name", moefold.__all__)
def test_the_example_of_a_name_runs(name: str, tmp_path: Path) -> None:
    found = getattr(moefold, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(found, name, globs={"tmp": str(tmp_path)})
    assert f"moefold.{name}" in example.docstring and example.examples, f"{name} has no example that uses it"
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert said == []


def test_every_public_method_is_documented() -> None:
    for name in moefold.__all__:
        found = getattr(moefold, name)
        if inspect.isclass(found) and name not in ("Verdict", "Problem"):
            for member, value in vars(found).items():
                if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    assert value.__doc__, f"{name}.{member}"


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == reference(), (
        "run `python -m moefold.cli.api_reference > docs/api.md`"
    )
