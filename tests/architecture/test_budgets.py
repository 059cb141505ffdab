"""What keeps the source readable and safe: short files, short functions, telling names, no dangerous calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "moefold"
FILES = sorted(SRC.rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 400, 80
EXCUSE = "Long because:"

NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc"}
# They run whatever is inside the bytes they read.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "torch.load", "os.system", "os.popen"}
CALLS |= {
    f"yaml.{name}" for name in ("load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all")
}
# They pickle on one rank and unpickle on another.
COLLECTIVES = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
COLLECTIVES |= {"send_object_list", "recv_object_list"}


def file_id(path: Path) -> str:
    return str(path.relative_to(SRC))


@pytest.mark.parametrize("path", FILES, ids=file_id)
def test_file_is_short_and_named(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE, f"{lines} lines: two ideas, split it"
    assert path.stem not in NAMES_THAT_SAY_NOTHING


@pytest.mark.parametrize("path", FILES, ids=file_id)
def test_functions_are_short(path: Path) -> None:
    assert not list(long_functions(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=file_id)
def test_nothing_dangerous_is_called(path: Path) -> None:
    assert not list(dangerous(path.read_text()))


def long_functions(source: str) -> Iterator[str]:
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = lines[node.lineno - 1 : node.end_lineno]
            excused = any(line.strip(" #\"'").startswith(EXCUSE) for line in body)
            if len(body) > MAX_FUNCTION and not excused:
                yield f"{node.name} (line {node.lineno}) has {len(body)} lines and no line that starts {EXCUSE!r}"


def dangerous(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"imports {alias.name}" for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in MODULES:
                yield f"imports from {node.module}"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (f"imports {name}" for name in sorted(full & CALLS))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name.rpartition(".")[2] in COLLECTIVES:
                yield f"calls {name}"
            for keyword in node.keywords:
                if keyword.arg in ("shell", "allow_pickle") and ast.unparse(keyword.value) != "False":
                    yield f"calls {name} with {keyword.arg}={ast.unparse(keyword.value)}"


BAD = (
    "import pickle",
    "from dill import loads",
    "from torch import load",
    "x = eval('1')",
    "torch.load(path)",
    "yaml.load(text, Loader=Strict)",
    "subprocess.run(line, shell=True)",
    "np.load(path, allow_pickle=True)",
    "dist.all_gather_object(out, thing)",
)


@pytest.mark.parametrize("source", BAD)
def test_a_dangerous_line_is_noticed(source: str) -> None:
    assert len(list(dangerous(source))) == 1


def test_what_only_looks_dangerous_is_fine() -> None:
    assert not list(dangerous("model.eval()\nyaml.safe_load(text)\nsubprocess.run(words)\nimport safetensors"))


def test_a_long_function_is_noticed_unless_it_says_why() -> None:
    body = "    x = 1\n" * MAX_FUNCTION
    assert len(list(long_functions("def f():\n" + body))) == 1
    assert not list(long_functions("def f():\n    # Long because: one table, read top to bottom.\n" + body))
