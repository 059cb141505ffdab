"""Every call of another library that an adapter makes fits the library's own signatures, as they were recorded.

Calls are found in the adapters' source and held against `tests/engines/signatures`, so that this needs no library and
no GPU. The fakes of the contract tests are held against the same files: they take nothing that the library does not.
"""

from __future__ import annotations

import ast
import inspect
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engines import fake_deepgemm, fake_te_gemm, fake_te_storage, test_transformer_engine
from tests.engines.fake_deepep import Buffer
from tests.engines.fake_deepep_elastic import ElasticBuffer
from tests.engines.fake_symm_mem import FakeSymmetricMemory
from tests.engines.record_signatures import (
    FOLDER,
    SOURCES,
    cpp_signature,
    pybind_signature,
    python_signature,
    read_wheel,
    record_torch,
)
from tests.engines.test_mxfp8 import to_mxfp8_then_scaled_grouped_mm

from moefold.ops.engines import ENGINES, _numbers

PACKAGE = Path(__file__).parents[2] / "src" / "moefold"
RECORDED: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))
}


@dataclass(frozen=True)
class Adapter:
    """Files, the signatures that their calls must fit, and what names for the library's objects stand for.

    `buffer.dispatch` with {"buffer": "Buffer"} is Buffer.dispatch; an empty name is the module itself.
    """

    files: tuple[str, ...]
    recorded: tuple[str, ...]
    objects: dict[str, str]
    # Objects whose attributes are read, and their classes.
    read: dict[str, str]


ADAPTERS = {
    "deepep": Adapter(
        ("moe/dispatch/deepep.py",),
        ("deepep-1.2.1", "deepep-2.1.0"),
        {"library": "", "buffer": "Buffer", "config": "Config"},
        {},
    ),
    "deepep_elastic": Adapter(
        ("moe/dispatch/deepep_elastic.py",),
        ("deepep_elastic-2.1.0",),
        {"library": "", "buffer": "ElasticBuffer"},
        {"handle": "EPHandle"},
    ),
    "deepgemm": Adapter(("nn/grouped_deepgemm.py",), ("deepgemm-2.6.1",), {"library": ""}, {}),
    "mxfp8": Adapter(("nn/grouped_mxfp8.py",), ("mxfp8-0.18.0", "mxfp8-0.19.0"), {"library": ""}, {}),
    "transformer_engine": Adapter(("moe/grouped_experts.py",), ("transformer_engine-2.18.0",), {"library": ""}, {}),
    "transformer_engine_gemm": Adapter(
        ("nn/te_matmul.py", "nn/te_narrow_gemm.py"),
        ("transformer_engine_gemm-2.18.0", "transformer_engine_gemm-2.20.0"),
        {"library": ""},
        {},
    ),
    "transformer_engine_storage": Adapter(
        ("nn/te_narrow_gemm.py",),
        ("transformer_engine_storage-2.18.0", "transformer_engine_storage-2.20.0"),
        {"storages": ""},
        {},
    ),
    "symmetric_memory": Adapter(
        ("moe/dispatch/symmetric_memory.py",), ("symmetric_memory-2.13.0",), {"library": "", "ops": ""}, {}
    ),
}
# Calls with arguments that depend on the release: `tests/body/test_varlen_adapters.py` binds them as they are made.
BOUND_WHEN_CALLED = {"flash_attn_2", "flash_attn_3", "flash_attn_4"}
CASES = [(name, version) for name, adapter in ADAPTERS.items() for version in adapter.recorded]


# ---- calls in a source ----


def calls_of(source: str, objects: dict[str, str]) -> Iterator[tuple[str, ast.Call, int | None]]:
    """Every call on one of these objects: the library's name of it, the call, and how many values are unpacked."""
    unpacked: dict[int, int] = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            unpacked[id(node.value)] = len(node.targets[0].elts)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        root, _, rest = ast.unparse(node.func).removeprefix("self.").partition(".")
        if root in objects:
            yield ".".join(filter(None, (objects[root], rest))), node, unpacked.get(id(node))


def misfits(call: ast.Call, signature: dict[str, Any], unpacked: int | None) -> list[str]:
    """Why a call does not fit a recorded signature; empty if it does."""
    parameters: list[dict[str, str]] = signature["parameters"]
    by_position = [each["name"] for each in parameters if each["how"] in ("any", "position")]
    by_name = {each["name"] for each in parameters if each["how"] in ("any", "keyword")}
    rest = [each["name"] for each in parameters if each["how"] == "rest"]
    assert not any(isinstance(each, ast.Starred) for each in call.args), "the number of arguments must be in the source"
    names = [keyword.arg for keyword in call.keywords]
    given = [*by_position[: len(call.args)], *(each for each in names if each is not None)]
    found = [f"no argument {each}" for each in names if each not in by_name]
    if len(call.args) > len(by_position) and not rest:
        found.append(f"{len(call.args)} arguments by position, of {len(by_position)}")
    found += [f"{each} is given twice" for each in set(given) if given.count(each) > 1]
    needed = [each["name"] for each in parameters if "default" not in each and each["how"] != "rest"]
    found += [f"{each} is missing" for each in needed if each not in given]
    if unpacked is not None and signature["returns"] not in (None, unpacked):
        found.append(f"{unpacked} values are unpacked, of {signature['returns']}")
    return found


def constructors(name: str, functions: dict[str, Any]) -> str:
    return next((made for made in (f"{name}.__init__", f"{name}.__new__") if made in functions), name)


@pytest.mark.parametrize(("name", "version"), CASES)
def test_every_call_fits_the_recorded_signature(name: str, version: str) -> None:
    adapter, recorded = ADAPTERS[name], RECORDED[version]
    offenders, seen = [], 0
    for file in adapter.files:
        for what, call, unpacked in calls_of((PACKAGE / file).read_text(), adapter.objects):
            signature = recorded["functions"].get(constructors(what, recorded["functions"]))
            words = ["not recorded"] if signature is None else misfits(call, signature, unpacked)
            offenders += [f"{file}:{call.lineno}: {what}: {each}" for each in words]
            seen += 1
    assert not offenders, "\n".join(offenders)
    assert seen >= {"mxfp8": 1, "transformer_engine": 3, "transformer_engine_gemm": 3}.get(name, 4)


@pytest.mark.parametrize(("name", "version"), CASES)
def test_every_name_that_is_read_exists(name: str, version: str) -> None:
    adapter, recorded = ADAPTERS[name], RECORDED[version]
    nodes = (node for file in adapter.files for node in ast.walk(ast.parse((PACKAGE / file).read_text())))
    for node in nodes:
        if not isinstance(node, ast.Attribute):
            continue
        root = ast.unparse(node.value).removeprefix("self.")
        if root in adapter.objects and not adapter.objects[root] and root != "ops":
            assert node.attr in recorded["module"], f"{version} has no {node.attr}"
        elif root in adapter.read:
            assert node.attr in recorded["attributes"][adapter.read[root]], f"{version}: {root} has no {node.attr}"


def test_every_engine_has_an_adapter_and_versions_that_were_recorded() -> None:
    assert ENGINES.keys() == SOURCES.keys() | {"symmetric_memory"} == {each["library"] for each in RECORDED.values()}
    assert ADAPTERS.keys() | BOUND_WHEN_CALLED == ENGINES.keys()
    for path, recorded in RECORDED.items():
        engine = ENGINES[recorded["library"]]
        assert path == f"{engine.name}-{recorded['version']}"
        assert engine.name in BOUND_WHEN_CALLED or path in ADAPTERS[engine.name].recorded
        assert _numbers(engine.since) <= _numbers(recorded["version"]) < _numbers(engine.below)
        assert len(recorded.get("commit", "")) == 40 or len(recorded.get("sha256", "")) == 64
        assert recorded["recorded"] >= "2026-11-15"


def test_the_recorded_signatures_of_torch_are_those_of_the_installed_one() -> None:
    """Every other library is absent here; torch is not."""
    assert record_torch()["functions"] == RECORDED["symmetric_memory-2.13.0"]["functions"]


# ---- the fakes ----

FAKES: list[tuple[str, str, Callable[..., Any]]] = [
    *(
        (version, f"Buffer.{name}", getattr(Buffer, name))
        for version in ("deepep-1.2.1", "deepep-2.1.0")
        for name in ("__init__", "get_dispatch_config", "get_dispatch_layout", "dispatch", "combine")
    ),
    *(
        ("deepep_elastic-2.1.0", f"ElasticBuffer.{name}", getattr(ElasticBuffer, name))
        for name in ("__init__", "dispatch", "combine")
    ),
    *(("deepgemm-2.6.1", name, getattr(fake_deepgemm, name)) for name in RECORDED["deepgemm-2.6.1"]["functions"]),
    *(
        ("transformer_engine-2.18.0", name, getattr(test_transformer_engine, name))
        for name in RECORDED["transformer_engine-2.18.0"]["functions"]
    ),
    *(
        (version, name, getattr(fake_te_gemm, name))
        for version in ADAPTERS["transformer_engine_gemm"].recorded
        for name in RECORDED[version]["functions"]
    ),
    *(
        (version, name, getattr(fake_te_storage, name.partition(".")[0]).__init__)
        for version in ADAPTERS["transformer_engine_storage"].recorded
        for name in RECORDED[version]["functions"]
    ),
    ("mxfp8-0.18.0", "_to_mxfp8_then_scaled_grouped_mm", to_mxfp8_then_scaled_grouped_mm),
    *(
        ("symmetric_memory-2.13.0", name, getattr(FakeSymmetricMemory, name))
        for name in ("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset", "set_backend", "rendezvous")
    ),
]


@pytest.mark.parametrize(
    ("version", "name", "function"), FAKES, ids=lambda each: str(each) if isinstance(each, str) else ""
)
def test_a_fake_takes_arguments_of_the_library_in_its_order(
    version: str, name: str, function: Callable[..., Any]
) -> None:
    theirs = {each["name"]: each for each in RECORDED[version]["functions"][name]["parameters"]}
    ours = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    order = [list(theirs).index(each.name) for each in ours]
    assert order == sorted(order)
    for each in ours:
        needed = each.default is inspect.Parameter.empty
        assert needed == ("default" not in theirs[each.name]), each.name
    missing = theirs.keys() - {each.name for each in ours}
    assert all("default" in theirs[each] or theirs[each]["how"] == "rest" for each in missing)


# ---- the checker and the parsers ----

SIGNATURE = python_signature(
    "class B:\n def f(self, x, handle=None, *, fast=False) -> Tuple[int, Tuple[int, int]]: ...", "B.f"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a, b = buffer.f(1)", []),
        ("a, b = buffer.f(x=1, handle=2, fast=True)", []),
        ("buffer.f()", ["x is missing"]),
        ("buffer.f(1, 2, 3)", ["3 arguments by position, of 2"]),
        ("buffer.f(1, slow=2)", ["no argument slow"]),
        ("buffer.f(1, x=2)", ["x is given twice"]),
        ("a, b, c = self.buffer.f(1)", ["3 values are unpacked, of 2"]),
    ],
)
def test_a_call_that_does_not_fit_is_noticed(source: str, expected: list[str]) -> None:
    ((what, call, unpacked),) = calls_of(source, {"buffer": "B"})
    assert what == "B.f" and misfits(call, SIGNATURE, unpacked) == expected


def test_a_tuple_of_any_length_has_no_number_of_values() -> None:
    assert python_signature("def f() -> Tuple[int, ...]: ...", "f")["returns"] is None


def test_a_wheel_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a/b.py", "x = 1")
        wheel.writestr("a-1.dist-info/METADATA", "Name: a\nVersion: 1.0b2\n")
    with zipfile.ZipFile(tmp_path / "a.whl") as wheel:
        assert read_wheel(wheel)("a/b.py") == "x = 1" and "1.0b2" in read_wheel(wheel)("METADATA")
        with pytest.raises(FileNotFoundError):
            read_wheel(wheel)("a/c.py")


def test_cpp_declarations_are_read() -> None:
    bound = 'm.def("gemm", &gemm,\n py::arg("a"), py::arg("c") = std::nullopt,\n py::arg("dims") = "nk");'
    assert pybind_signature(bound, "gemm")["parameters"] == [
        {"name": "a", "how": "any"},
        {"name": "c", "how": "any", "default": "std::nullopt"},
        {"name": "dims", "how": "any", "default": '"nk"'},
    ]
    assert pybind_signature('m.def("block", [&]() {\n return 128;\n });', "block")["parameters"] == []
    with pytest.raises(AssertionError, match="arguments without names"):
        pybind_signature('m.def("gemm", &gemm);', "gemm")
    hint = "size_t hint(size_t hidden_bytes, const int& ranks) const {"
    assert [each["name"] for each in cpp_signature(hint, "Config.hint")["parameters"]] == ["hidden_bytes", "ranks"]
