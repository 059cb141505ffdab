"""What keeps the source readable and safe: few, short files, short functions, telling names, no dangerous calls."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import PurePath

import pytest
from tests.architecture.sources import PACKAGE, report, shown, source_files, text_of, tree_of

MAX_FILE, MAX_FUNCTION = 400, 80
EXCUSE = "Long because:"
# Lower them when the tree has become smaller. Only a mechanism that is new raises the first: exchanges inside of GEMMs
# have three files; what of a layer is launched, what its work depends on, what operators are repeated, what presets
# of a release say, which link carries what,
# and how long a ramp of the batch takes, one each.
MAX_FILES = 568
MAX_ANY_IN_BODY = 258

NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc"}
# A check is named after the section of the configuration that it checks, C code after the op that calls it. Files of
# cli/ are named by verb and may repeat any name.
MIRRORS = ({"config", "checks"}, {"ops", "ops/native"})
BRAIN = {"batching", "blueprint", "checks", "config", "hardware", "html", "plan", "recipes", "schedule", "topology"}
# They run whatever is inside the bytes they read.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "torch.load", "os.system", "os.popen"}
CALLS |= {
    f"yaml.{name}" for name in ("load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all")
}
# They pickle on one rank and unpickle on another.
COLLECTIVES = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
COLLECTIVES |= {"send_object_list", "recv_object_list"}


def test_the_tree_has_few_files() -> None:
    assert len(source_files()) <= MAX_FILES


def test_files_are_short_and_named() -> None:
    offenders = []
    for path in source_files():
        lines = len(text_of(path).splitlines())
        if lines > MAX_FILE:
            offenders.append(f"{shown(path)}: {lines} lines: two ideas, split it")
        if path.stem in NAMES_THAT_SAY_NOTHING:
            offenders.append(f"{shown(path)}: the name says nothing")
    assert not offenders, report(offenders)


def test_functions_are_short() -> None:
    offenders = [f"{shown(path)}: {what}" for path in source_files() for what in long_functions(text_of(path))]
    assert not offenders, report(offenders)


def test_nothing_dangerous_is_called() -> None:
    offenders = [f"{shown(path)}: {what}" for path in source_files() for what in dangerous(text_of(path))]
    assert not offenders, report(offenders)


def test_no_file_name_is_used_twice() -> None:
    repeated = repeated_names([path.relative_to(PACKAGE) for path in source_files()])
    offenders = [f"{name}: {folders}" for name, folders in repeated.items()]
    assert not offenders, report(offenders)


def test_any_in_the_body_only_becomes_rarer() -> None:
    counts = Counter({shown(path): count for path in source_files() if in_body(path) and (count := num_any(path))})
    most = [f"{path}: {count}" for path, count in counts.most_common(20)]
    assert counts.total() <= MAX_ANY_IN_BODY, f"{counts.total()} uses of Any, {MAX_ANY_IN_BODY} allowed; " + report(
        most
    )


def in_body(path: PurePath) -> bool:
    parts = path.relative_to(PACKAGE).parts
    return len(parts) > 1 and parts[0] not in BRAIN


def num_any(path: PurePath) -> int:
    """How often the type Any is written in a file, not counting its import."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree_of(PACKAGE / path)))


def repeated_names(paths: list[PurePath]) -> dict[str, str]:
    """File names that are in two folders which are not declared to mirror each other, and those folders."""
    folders = defaultdict(set)
    for path in paths:
        if path.name != "__init__.py" and path.parts[0] != "cli":
            folders[path.name].add(str(path.parent))
    return {
        name: ", ".join(sorted(found))
        for name, found in sorted(folders.items())
        if len(found) > 1 and not any(found <= mirror for mirror in MIRRORS)
    }


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


def test_a_second_file_of_one_name_is_noticed() -> None:
    assert repeated_names([PurePath("ops/rope.py"), PurePath("attention/rope.py")]) == {"rope.py": "attention, ops"}
    assert not repeated_names([PurePath("config/data.py"), PurePath("checks/data.py"), PurePath("cli/plan.py")])
