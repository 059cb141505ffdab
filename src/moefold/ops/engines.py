"""Libraries of others that a run may name, and their versions: the only place that imports them.

A dispatcher or a grouped GEMM of another library is an adapter in moefold and an optional package on the machine. The
package is imported when a run names it and not before, so that moefold imports without it. A package that is missing,
or whose version is outside of what the adapter's calls were held against, is a ``BackendError`` that says how to
install one that fits. docs/engines.md says what was checked of each.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from moefold.errors import BackendError, UnknownNameError


@dataclass(frozen=True)
class Engine:
    """A module of a package, and the versions of the package whose signatures were held against the adapter's calls."""

    name: str
    module: str
    package: str
    # The first version that fits, and the first after it that does not.
    since: str
    below: str
    install: str

    @property
    def versions(self) -> str:
        return f"{self.package} >={self.since},<{self.below}"


_DEEPEP = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP (needs nvcc, NCCL or NVSHMEM)"
_DEEPGEMM = (
    "clone https://github.com/deepseek-ai/DeepGEMM with its submodules and run its install.sh (needs nvcc); no package "
    "index has it"
)
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("deepep", "deep_ep", "deep_ep", "1.2.1", "3", _DEEPEP),
        Engine("deepep_elastic", "deep_ep", "deep_ep", "2.1", "3", _DEEPEP),
        Engine("deepgemm", "deep_gemm", "deep_gemm", "2.6", "3", _DEEPGEMM),
        Engine(
            "mxfp8",
            "torchao.prototype.moe_training",
            "torchao",
            "0.18",
            "0.20",
            "pip install 'moefold[mxfp8]' (a CUDA 12.8 build or later, for sm_100)",
        ),
        Engine(
            "transformer_engine",
            "transformer_engine.pytorch",
            "transformer_engine",
            "2.18",
            "3",
            "pip install --no-build-isolation 'transformer_engine[pytorch]'",
        ),
        Engine(
            "symmetric_memory",
            "torch.distributed._symmetric_memory",
            "torch",
            "2.11",
            "3",
            "install a CUDA build of torch with NVSHMEM",
        ),
    )
}


def load_engine(name: str) -> ModuleType:
    """The module of an engine, or an error that says what is missing and how to install it."""
    if name not in ENGINES:
        raise UnknownNameError("engine", name, ENGINES)
    engine = ENGINES[name]
    found = installed_version(engine.package)
    if found is None:
        raise BackendError(f"{name}: {engine.package} is not installed; needs {engine.versions}: {engine.install}")
    if not _numbers(engine.since) <= _numbers(found) < _numbers(engine.below):
        raise BackendError(f"{name}: {engine.package} {found} is installed; needs {engine.versions}: {engine.install}")
    try:
        return importlib.import_module(engine.module)
    except (ImportError, OSError, AssertionError) as error:
        # A library that was built for another CUDA or NCCL fails here, with its own words.
        raise BackendError(f"{name}: {engine.package} {found} does not import: {error}; {engine.install}") from error


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def install_hint(package: str) -> str:
    """How to install the package of an engine; empty for other packages."""
    return next((engine.install for engine in ENGINES.values() if engine.package == package), "")


def _numbers(text: str) -> tuple[int, ...]:
    """The release numbers of a version: (2, 1, 0) of 2.1.0.dev3+cu129. A missing number counts as 0."""
    release = re.match(r"\d+(\.\d+)*", text)
    found = tuple(map(int, release.group().split("."))) if release else ()
    return (*found, *(0,) * (4 - len(found)))
