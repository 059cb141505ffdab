"""Other libraries are imported only when a run names them, and a missing one says how to install it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import get_args

import pytest

from moefold.comm.process_groups import Groups, Ledger
from moefold.config.loading import override
from moefold.config.moe import MoEConfig
from moefold.config.parallel import EngineDispatcher, ParallelConfig
from moefold.errors import BackendError, UnknownNameError
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES
from moefold.moe.expert_backends import expert_backend
from moefold.moe.moe_kernels import kernels_for
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.ops import engines
from moefold.ops.backends import BACKENDS
from moefold.ops.engines import ENGINES, LIBRARIES, OPTIONAL, load_engine
from moefold.parallel.dispatchers import ENGINE_DISPATCHERS
from moefold.recipes.catalog import recipe
from moefold.topology.folded_layout import fold

ROOT = Path(__file__).parents[2]
ABSENT = [name for name in ENGINES if name != "symmetric_memory"]


def test_every_backend_that_needs_a_package_names_it_in_the_table() -> None:
    named = {backend.engine for backend in BACKENDS} - {None}
    assert named == {*ENGINES, "triton"}
    assert not ENGINES.keys() & LIBRARIES.keys()


def test_extras_are_those_of_the_table() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    # torch is asked for by itself, verl imports moefold, and two extras are for those who work on it.
    others = {"dev", "docs", "torch", "verl"}
    assert {engine.extra for engine in OPTIONAL.values() if engine.extra} == extras.keys() - others
    for engine in OPTIONAL.values():
        if engine.extra is None:
            continue
        wanted = next(each for each in extras[engine.extra] if re.match(rf"{engine.package}\b(?!-)", each))
        lowest = re.search(r">=([\d.]+)", wanted)
        assert (lowest is None) == (engine.since == "") and (lowest is None or engine.fits(lowest.group(1)))
        assert (f"<{engine.below}" in wanted) == bool(engine.below), wanted


def test_optional_packages_are_imported_through_the_table() -> None:
    """Files of kernels import triton themselves, and the adapter for lm_eval its modules, after the table was asked."""
    roots = {engine.module.partition(".")[0] for engine in OPTIONAL.values()} - {"torch", "triton"}
    roots.add("torch.utils.tensorboard")
    offenders = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text()
        if path.name == "lm_eval_adapter.py":
            continue
        if not any(f"import {root}" in text or f"from {root}" in text for root in roots):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            offenders += [f"{path}:{node.lineno} {name}" for name in names if {name, name.partition(".")[0]} & roots]
    assert not offenders, "\n".join(offenders)


def test_every_engine_dispatcher_is_in_the_table() -> None:
    assert ENGINE_DISPATCHERS.keys() == set(get_args(EngineDispatcher))


def test_nothing_is_imported_before_it_is_named() -> None:
    code = "import sys, moefold.parallel.parallelize; print([m for m in sys.modules if m.split('.')[0] in {}])"
    packages = sorted({engine.package for engine in ENGINES.values()} - {"torch"})
    done = subprocess.run([sys.executable, "-c", code.format(packages)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ABSENT)
def test_a_missing_package_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "installed_version", lambda package: None)
    with pytest.raises(BackendError) as error:
        load_engine(name)
    engine = ENGINES[name]
    assert str(error.value) == f"{name}: {engine.package} is not installed, {engine.needs} is needed: {engine.install}"


@pytest.mark.parametrize(
    ("name", "found", "fits"),
    [
        ("deepep", "1.2.0", False),
        ("deepep", "1.2.1+9af0e0d", True),
        ("deepep", "3.0.0", False),
        ("deepep_elastic", "1.2.1", False),
        ("deepep_elastic", "2.1.0+dd758ca", True),
        ("mxfp8", "0.17.0", False),
        ("mxfp8", "0.18.0", True),
        ("mxfp8", "0.20.0.dev20261001", False),
        ("deepgemm", "2.5.0", False),
    ],
)
def test_versions_are_checked(name: str, found: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "installed_version", lambda package: found)
    monkeypatch.setattr(engines.importlib, "import_module", lambda module: sys)
    if fits:
        assert load_engine(name) is sys
        return
    with pytest.raises(BackendError, match=rf"{found.split('+')[0]} is installed, .* is needed"):
        load_engine(name)


def test_a_package_that_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: str) -> None:
        raise OSError("libnvshmem_host.so.3: cannot open shared object file")

    monkeypatch.setattr(engines, "installed_version", lambda package: "2.1.0")
    monkeypatch.setattr(engines.importlib, "import_module", broken)
    with pytest.raises(BackendError, match=r"deep_ep 2.1.0 does not import: libnvshmem_host.so.3"):
        load_engine("deepep")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'deepep'"):
        load_engine("deepp")


@pytest.mark.parametrize("name", [name for name in get_args(EngineDispatcher) if name in ABSENT])
def test_a_run_that_names_a_missing_dispatcher_stops_when_it_is_built(
    name: EngineDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "installed_version", lambda package: None)
    run = override(recipe("debug_tiny"), [f"--parallel.dispatcher={name}"])
    groups = Groups(fold(ParallelConfig(), 1), 0, Ledger(), timedelta(seconds=1))
    with pytest.raises(BackendError, match=f"{name}: deep_ep is not installed, "):
        ENGINE_DISPATCHERS[name](run, groups, SYNC_SPLIT_SIZES)


@pytest.mark.parametrize(("experts", "package"), [("deepgemm", "deep_gemm"), ("mxfp8", "torchao")])
def test_experts_of_another_version_stop_when_they_are_built(
    experts: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "installed_version", lambda package: "0.0.1")
    with pytest.raises(BackendError, match=f"{experts}: {package} 0.0.1 is installed, {package} >="):
        expert_backend(experts, ParameterMatmul())(MoEConfig())


@pytest.mark.parametrize(("experts", "package"), [("deepgemm", "deep_gemm"), ("mxfp8", "torchao")])
def test_a_run_that_names_missing_experts_stops_with_all_reasons(experts: str, package: str) -> None:
    run = override(recipe("debug_tiny"), [f"--kernels.experts={experts}", "--precision.compute=float32"])
    with pytest.raises(BackendError) as error:
        kernels_for(run, "cuda")
    said = str(error.value)
    assert "there is no GPU here" in said and "takes bfloat16, not float32" in said
    assert f"{package} is not installed, {package} >=" in said and "what works here" in said
