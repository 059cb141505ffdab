"""Optional packages: what a run may name, the versions that fit, and the error where one is missing. One table.

A dispatcher, a GEMM or an attention of another library is an adapter in moefold and an optional package on the machine.
The package is imported when a run names it and not before, so that moefold imports without it. A package that is
missing, or whose version is outside of what the adapter's calls were held against, is a ``BackendError`` that says how
to install one that fits. ``ops/backends.py``, `moefold doctor` and every import of an optional package read this table;
docs/engines.md says what was checked of each engine.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from moefold.errors import BackendError, UnknownNameError


@dataclass(frozen=True)
class Engine:
    """What a run names: the module that is imported, and its package. ``extra`` is moefold's, where there is one."""

    name: str
    module: str
    package: str
    # The first version that fits, and the first after it that does not; empty: any.
    since: str
    below: str
    # How to install it: a command, or with an extra what else it needs.
    how: str = ""
    extra: str | None = None

    @property
    def needs(self) -> str:
        bounds = [f"{sign}{bound}" for sign, bound in ((">=", self.since), ("<", self.below)) if bound]
        return f"{self.package} {','.join(bounds)}".rstrip()

    @property
    def install(self) -> str:
        if self.extra is None:
            return self.how
        return f"pip install 'moefold[{self.extra}]'" + (f" ({self.how})" if self.how else "")

    def fits(self, found: str) -> bool:
        return _numbers(self.since) <= _numbers(found) and (not self.below or _numbers(found) < _numbers(self.below))

    def problem(self, found: str | None) -> str:
        """Empty where this installed version fits; else what is wrong, what is needed, and how to install it."""
        if found is not None and self.fits(found):
            return ""
        state = "is not installed" if found is None else f"{found} is installed"
        return f"{self.package} {state}, {self.needs} is needed: {self.install}"


_DEEPEP = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP (needs nvcc, NCCL or NVSHMEM)"
_DEEPGEMM = (
    "clone https://github.com/deepseek-ai/DeepGEMM with its submodules and run its install.sh (needs nvcc); no package "
    "index has it"
)
_TE = ("transformer_engine", "2.18", "3", "with --no-build-isolation; needs nvcc and cuDNN", "transformer-engine")

# Adapters, each with recorded signatures of the calls that it makes.
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("deepep", "deep_ep", "deep_ep", "1.2.1", "3", _DEEPEP),
        Engine("deepep_elastic", "deep_ep", "deep_ep", "2.1", "3", _DEEPEP),
        Engine(
            "symmetric_memory",
            "torch.distributed._symmetric_memory",
            "torch",
            "2.11",
            "3",
            "install a CUDA build of torch with NVSHMEM",
        ),
        Engine("deepgemm", "deep_gemm", "deep_gemm", "2.6", "3", _DEEPGEMM),
        Engine(
            "mxfp8",
            "torchao.prototype.moe_training",
            "torchao",
            "0.18",
            "0.20",
            "a CUDA 12.8 build or later, for sm_100",
            "mxfp8",
        ),
        Engine("transformer_engine", "transformer_engine.pytorch", *_TE),
        Engine("transformer_engine_gemm", "transformer_engine.pytorch.cpp_extensions", *_TE),
        Engine("transformer_engine_storage", "transformer_engine.pytorch.tensor.storage", *_TE),
        Engine("flash_attn_2", "flash_attn.flash_attn_interface", "flash-attn", "2.7", "3", "", "flash-attn-2"),
        Engine(
            "flash_attn_3", "flash_attn_interface", "flash-attn-3", "3", "4", "build flash-attention's folder hopper"
        ),
        Engine("flash_attn_4", "flash_attn.cute.interface", "flash-attn-4", "4", "5", "", "flash-attn-4"),
    )
}
# Packages without an adapter: what they do is called as it is.
LIBRARIES: dict[str, Engine] = {
    library.name: library
    for library in (
        # GPU builds of torch bring their own.
        Engine("triton", "triton", "triton", "3.6", "4", "", "kernels"),
        Engine("transformers", "transformers", "transformers", "", "", "", "hf"),
        Engine("tokenizers", "tokenizers", "tokenizers", "", "", "", "hf"),
        Engine("huggingface_hub", "huggingface_hub", "huggingface_hub", "", "", "", "data"),
        Engine("pyarrow.parquet", "pyarrow.parquet", "pyarrow", "", "", "", "data"),
        Engine("zstandard", "zstandard", "zstandard", "", "", "", "data"),
        Engine("datasets", "datasets", "datasets", "", "", "", "data"),
        Engine("s3fs", "s3fs", "s3fs", "", "", "", "s3"),
        Engine("lm_eval", "lm_eval", "lm_eval", "0.4.9", "", "", "eval"),
        Engine("tensorboard", "torch.utils.tensorboard", "tensorboard", "", "", "pip install tensorboard"),
        Engine("wandb", "wandb", "wandb", "", "", "pip install wandb"),
        Engine("mlflow", "mlflow", "mlflow-skinny", "", "", "pip install mlflow-skinny"),
    )
}
OPTIONAL = ENGINES | LIBRARIES
# What `moefold doctor` looks for; torch itself is not optional.
PACKAGES = tuple(dict.fromkeys(engine.package for engine in OPTIONAL.values() if engine.package != "torch"))


def load_engine(name: str) -> ModuleType:
    """The module of an optional package, or an error that says what is missing and how to install it."""
    if name not in OPTIONAL:
        raise UnknownNameError("engine", name, OPTIONAL)
    engine = OPTIONAL[name]
    found = installed_version(engine.package)
    problem = engine.problem(found)
    # Where any version fits, a package counts that imports, also one that was put on the path without being installed.
    if problem and engine.since:
        raise BackendError(f"{name}: {problem}")
    try:
        return importlib.import_module(engine.module)
    except (ImportError, OSError, AssertionError) as error:
        # A library that was built for another CUDA or NCCL fails here, with its own words.
        broken = f"{engine.package} {found} does not import: {error}; {engine.install}"
        raise BackendError(f"{name}: {problem or broken}") from error


@cache
def installed_version(package: str) -> str | None:
    """Does not change while a process runs, and reading the metadata of a package takes milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """The release numbers of a version: (2, 1, 0) of 2.1.0.dev3+cu129. A missing number counts as 0."""
    release = re.match(r"\d+(\.\d+)*", text)
    found = tuple(map(int, release.group().split("."))) if release else ()
    return (*found, *(0,) * (4 - len(found)))
