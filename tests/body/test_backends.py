"""The table of backends: a name gives that backend or a reason, and moefold does without what is optional."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moefold.cli.main import main
from moefold.config.precision import KernelsConfig
from moefold.config.run import RunConfig
from moefold.errors import BackendError
from moefold.moe.moe_kernels import MOE_IN_TORCH, kernels_for, kernels_named
from moefold.ops.backends import BACKENDS, JOBS, resolve, why_not
from moefold.ops.engines import OPTIONAL
from moefold.ops.host_probe import GpuInfo, HostInfo, probe_host

SRC = Path(__file__).parents[2] / "src"
NO_TRITON = "triton is not installed, triton >=3.6,<4 is needed: pip install 'moefold[kernels]'"
HOPPER, TURING = GpuInfo("H100", (9, 0), 80 << 30), GpuInfo("T4", (7, 5), 16 << 30)

IMPORT_ALL = """
import importlib, sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError(f"somebody asked for {name}")

sys.meta_path.insert(0, NoTriton())
for name in sys.argv[1:]:
    importlib.import_module(name)
from moefold.moe.moe_kernels import kernels_named
kernels_named("torch", "cpu")
"""


@pytest.fixture
def here() -> HostInfo:
    return dataclasses.replace(probe_host(), gpus=(HOPPER,), packages={"triton": "3.9.0"})


@pytest.mark.slow
def test_moefold_imports_without_triton() -> None:
    """All but the kernels themselves, their build and their interpreter; verl imports the engine that is for it."""
    own = {"aot_build", "interpret"}
    paths = [
        path for path in sorted((SRC / "moefold").rglob("*.py")) if path.stem not in own or "kernels" not in path.parts
    ]
    names = [".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    names = [name for name in names if not name.endswith(("_triton", ".verl_engine")) and ".bench.peers" not in name]
    assert "moefold.ops.backends" in names and "moefold.moe.kernels.moe_references" in names
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_references_work_everywhere() -> None:
    assert all(callable(getattr(kernels_named("torch", "cpu", "float64"), job)) for job in JOBS)


def test_kernels_are_refused_without_a_gpu() -> None:
    with pytest.raises(BackendError) as refused:
        kernels_named("triton", "cpu", here=dataclasses.replace(probe_host(), gpus=()))
    assert str(refused.value) == (
        "kernels.backend: triton cannot do map_rows: runs on cuda, not on cpu; what works here on cpu: torch; "
        "`moefold doctor` shows all"
    )


def test_kernels_are_given_with_one(here: HostInfo) -> None:
    pytest.importorskip("triton", reason="kernels are an extra")
    found = kernels_named("triton", "cuda", "bfloat16", here)
    references = kernels_named("torch", "cuda", "bfloat16", here)
    for job in JOBS:
        assert getattr(found, job) is not getattr(references, job), job


def test_native_changes_activations_only(here: HostInfo) -> None:
    found = kernels_named("native", "cpu", "bfloat16", dataclasses.replace(here, compiler="cc"))
    changed = {job for job in (*JOBS, "glu") if getattr(found, job) is not getattr(MOE_IN_TORCH, job)}
    assert changed == {"glu", "weighted_activation"}
    with pytest.raises(BackendError, match=r"native cannot do glu: there is no C compiler.*works here on cpu: torch"):
        kernels_named("native", "cpu", "bfloat16", dataclasses.replace(here, compiler=None))


@pytest.mark.parametrize(
    ("change", "number_format", "reason"),
    (
        ({"gpus": ()}, None, "there is no GPU here"),
        ({"gpus": (HOPPER, TURING)}, None, "T4 has compute capability 7.5, 8.0 is needed"),
        ({"packages": {}}, None, NO_TRITON),
        ({"packages": {"triton": "3.5.1"}}, None, NO_TRITON.replace("is not", "3.5.1 is")),
        ({}, "float64", "takes float32 and bfloat16, not float64"),
        ({"packages": {}, "gpus": ()}, None, f"there is no GPU here; {NO_TRITON}"),
        ({}, "bfloat16", ""),
    ),
)
def test_every_reason_is_told(
    here: HostInfo, change: dict[str, object], number_format: str | None, reason: str
) -> None:
    backend = next(backend for backend in BACKENDS if (backend.job, backend.name) == ("route", "triton"))
    assert why_not(backend, "cuda", dataclasses.replace(here, **change), number_format) == reason  # type: ignore[arg-type]


def test_an_unknown_name_is_refused(here: HostInfo) -> None:
    with pytest.raises(BackendError, match=r"did you mean 'grouped'\? what works here on cuda: sequential, grouped"):
        resolve("experts", "group", "cuda", here)


def test_names_are_unique() -> None:
    assert len({(backend.job, backend.name) for backend in BACKENDS}) == len(BACKENDS)


def test_doctor_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "amx_bf16" in text and "gloo" in text
    for backend in BACKENDS:
        assert f"{backend.job} " in text and f" {backend.name} " in text
    assert "runs on cuda, not on cpu" in text
    for name, engine in OPTIONAL.items():
        assert f"\n{name} " in text and f" {engine.install}\n" in text


def test_doctor_prints_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "cpu" and found["host"]["torch"] == torch.__version__
    assert {row["name"]: row["package"] for row in found["packages"]} == {
        name: engine.package for name, engine in OPTIONAL.items()
    }
    works = {(row["job"], row["backend"]): row["works"] for row in found["backends"]}
    assert works["experts", "sequential"] and not works["permute", "triton"]


def test_a_run_gets_what_it_asks_for_or_nothing() -> None:
    assert kernels_for(RunConfig(kernels=KernelsConfig(experts="fused")), "cpu") == MOE_IN_TORCH
    with pytest.raises(BackendError, match=r"kernels.backend: triton cannot do map_rows"):
        kernels_for(RunConfig(kernels=KernelsConfig(backend="triton")), "cpu")
    with pytest.raises(BackendError, match=r"kernels.experts: fused cannot do experts: runs on cpu, not on cuda"):
        kernels_for(RunConfig(kernels=KernelsConfig(experts="fused")), "cuda")
