"""Record the signatures of other libraries' functions that adapters call, from the libraries' own source.

    git clone https://github.com/deepseek-ai/DeepEP
    python -m tests.engines.record_signatures deepep DeepEP/.git v1.2.1

writes `tests/engines/signatures/deepep-1.2.1.json`. The source is read with git and parsed: Python with ast, C++ by its
pybind11 declarations; nothing of it is imported or run. Without a revision: the newest commit. A wheel is read as is:

    pip download --no-deps flash-attn-4==4.0.0b36
    python -m tests.engines.record_signatures flash_attn_4 flash_attn_4-4.0.0b36-py3-none-any.whl

The signatures of torch's symmetric memory are those of the torch that is installed:

    python -m tests.engines.record_signatures symmetric_memory

Tests read the recorded files only.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "signatures"
Signature = dict[str, Any]
Read = Callable[[str], str]


@dataclass(frozen=True)
class Source:
    """Which names are taken from which files. Where a file has moved, both places are listed."""

    url: str
    # A file, and a pattern whose first group is the version.
    version: tuple[tuple[str, ...], str]
    python: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    pybind: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    # C++ functions that are bound without names: their arguments have positions only.
    cpp: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    # The file whose imports are the module's names, and classes whose attributes are read.
    module: tuple[str, ...] = ()
    attributes: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)


_LEGACY = ("deep_ep/buffers/legacy.py", "deep_ep/buffer.py")
_CONFIG = ("csrc/legacy/config.hpp", "csrc/config.hpp")
_BUFFER_CALLS = (
    *("__init__", "set_num_sms", "get_dispatch_config", "get_combine_config", "get_dispatch_layout"),
    *("dispatch", "combine"),
)
_HINTS = ("get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint")
_GEMMS = (
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nn_contiguous",
    "k_grouped_bf16_gemm_tn_contiguous",
)
_FLASH_2, _FLASH_4 = ("flash_attn/flash_attn_interface.py",), ("flash_attn/cute/interface.py",)
_FLASH_3, _FLASH_URL = ("hopper/flash_attn_interface.py",), "https://github.com/Dao-AILab/flash-attention"
# Of a wheel.
_METADATA = "METADATA"
_TE_STORAGE = "transformer_engine/pytorch/tensor/storage"
_TE_GEMM = ("transformer_engine/pytorch/cpp_extensions/gemm.py",)
SOURCES = {
    "deepep": Source(
        "https://github.com/deepseek-ai/DeepEP",
        (("deep_ep/__init__.py", "setup.py"), r"(?:__version__\s*=|version=)\s*'([\d.]+)"),
        python={_LEGACY: tuple(f"Buffer.{name}" for name in _BUFFER_CALLS)},
        cpp={_CONFIG: tuple(f"Config.{name}" for name in _HINTS)},
        module=("deep_ep/__init__.py",),
    ),
    "deepep_elastic": Source(
        "https://github.com/deepseek-ai/DeepEP",
        (("deep_ep/__init__.py",), r"__version__\s*=\s*'([\d.]+)"),
        python={
            ("deep_ep/buffers/elastic.py",): tuple(
                f"ElasticBuffer.{name}" for name in ("__init__", "dispatch", "combine", "get_theoretical_num_sms")
            )
        },
        module=("deep_ep/__init__.py",),
        attributes={("deep_ep/buffers/elastic.py",): ("EPHandle",)},
    ),
    "deepgemm": Source(
        "https://github.com/deepseek-ai/DeepGEMM",
        (("deep_gemm/__init__.py",), r"__version__\s*=\s*'([\d.]+)"),
        pybind={
            ("csrc/apis/gemm.hpp",): _GEMMS,
            ("csrc/apis/layout.hpp",): ("get_mk_alignment_for_contiguous_layout",),
        },
        module=("deep_gemm/__init__.py", "deep_gemm/utils/layout.py"),
    ),
    "mxfp8": Source(
        "https://github.com/pytorch/ao",
        (("version.txt",), r"([\d.]+)"),
        python={
            ("torchao/prototype/moe_training/mxfp8_grouped_mm.py",): ("_to_mxfp8_then_scaled_grouped_mm",),
        },
        module=("torchao/prototype/moe_training/__init__.py",),
    ),
    "transformer_engine": Source(
        "https://github.com/NVIDIA/TransformerEngine",
        (("build_tools/VERSION.txt",), r"([\d.]+)"),
        python={
            ("transformer_engine/pytorch/permutation.py",): ("moe_permute", "moe_permute_with_probs", "moe_unpermute"),
        },
        module=("transformer_engine/pytorch/__init__.py",),
    ),
    "transformer_engine_gemm": Source(
        "https://github.com/NVIDIA/TransformerEngine",
        (("build_tools/VERSION.txt",), r"([\d.]+\d)"),
        python={_TE_GEMM: ("general_gemm", "general_grouped_gemm")},
        module=_TE_GEMM,
    ),
    "transformer_engine_storage": Source(
        "https://github.com/NVIDIA/TransformerEngine",
        (("build_tools/VERSION.txt",), r"([\d.]+\d)"),
        python={
            (f"{_TE_STORAGE}/{name}_storage.py",): (f"{kind}Storage.__new__",)
            for name, kind in (
                ("float8_tensor", "Float8Tensor"),
                ("float8_blockwise_tensor", "Float8BlockwiseQTensor"),
                ("mxfp8_tensor", "MXFP8Tensor"),
                ("nvfp4_tensor", "NVFP4Tensor"),
            )
        },
        module=(f"{_TE_STORAGE}/__init__.py",),
    ),
    "flash_attn_2": Source(
        _FLASH_URL,
        (("flash_attn/__init__.py",), r'__version__ = "([\w.]+)"'),
        python={_FLASH_2: ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")},
        module=_FLASH_2,
    ),
    "flash_attn_3": Source(
        _FLASH_URL,
        (("hopper/__init__.py",), r'__version__ = "([\w.]+)"'),
        python={_FLASH_3: ("_flash_attn_forward", "_flash_attn_backward")},
        module=_FLASH_3,
    ),
    "flash_attn_4": Source(
        _FLASH_URL,
        ((_METADATA,), r"\nVersion: ([\w.]+)"),
        python={_FLASH_4: ("_flash_attn_fwd", "_flash_attn_bwd")},
        module=_FLASH_4,
    ),
}


# ---- Python ----


def python_signature(source: str, name: str) -> Signature:
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == part)  # type: ignore[attr-defined]
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    required = len(arguments.args) - len(arguments.defaults)
    found = [
        _parameter(each.arg, "any", arguments.defaults[place - required] if place >= required else None)
        for place, each in enumerate(arguments.args)
    ]
    if arguments.vararg is not None:
        found = [_parameter(each["name"], "position", None) for each in found]
        found.append({"name": arguments.vararg.arg, "how": "rest"})
    static = any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
    if "." in name and not static:
        found = found[1:]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [_parameter(each.arg, "keyword", default) for each, default in pairs]
    return {"parameters": found, "returns": _returned(node)}


def _parameter(name: str, how: str, default: ast.expr | None) -> dict[str, str]:
    return {"name": name, "how": how} | ({} if default is None else {"default": ast.unparse(default)})


def _returned(function: ast.FunctionDef) -> int | None:
    """How many values it returns by its return statements where they agree, else by its annotation."""
    returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    sizes = {len(value.elts) for value in returns if isinstance(value, ast.Tuple)}
    return sizes.pop() if len(sizes) == 1 else _tuple_size(function.returns)


def _tuple_size(returns: ast.expr | None) -> int | None:
    """How many values a function returns by its annotation; None if it returns one, or does not say."""
    if not isinstance(returns, ast.Subscript) or ast.unparse(returns.value) not in ("Tuple", "tuple"):
        return None
    sizes = returns.slice.elts if isinstance(returns.slice, ast.Tuple) else []
    open_end = any(isinstance(each, ast.Constant) and each.value is ... for each in sizes)
    return None if open_end or not sizes else len(sizes)


def imported_names(source: str) -> list[str]:
    """Names that a package's file imports or defines, also inside of try blocks."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return sorted(names - {"*"})


def attribute_names(source: str, name: str) -> list[str]:
    """Attributes that a class's methods set on themselves."""
    node = next(each for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name == name)
    targets = [target for each in ast.walk(node) if isinstance(each, ast.Assign) for target in each.targets]
    return sorted(
        {each.attr for each in targets if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"}
    )


# ---- C++ ----


def pybind_signature(source: str, name: str) -> Signature:
    start = source.index(f'm.def("{name}"')
    declaration = source[start : _end_of_call(source, start + len("m.def"))]
    named = re.findall(r'py::arg\("(\w+)"\)(?:\s*=\s*([^,)]+))?', declaration)
    found = [
        {"name": each, "how": "any"} | ({"default": default.strip()} if default else {}) for each, default in named
    ]
    assert found or re.search(r"\[&?\]\(\)", declaration), f"{name} has arguments without names"
    return {"parameters": found, "returns": None}


def cpp_signature(source: str, name: str) -> Signature:
    found = re.search(rf"\b{name.rpartition('.')[2]}\(([^)]*)\) const \{{", source)
    assert found is not None, f"{name} is not declared"
    names = [each.split()[-1].lstrip("&*") for each in found.group(1).split(",") if each.strip()]
    return {"parameters": [{"name": each, "how": "position"} for each in names], "returns": None}


def _end_of_call(source: str, start: int) -> int:
    depth = 0
    for place in range(start, len(source)):
        depth += {"(": 1, ")": -1}.get(source[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError("a parenthesis is not closed")


# ---- recording ----


def record(name: str, read: Read) -> dict[str, Any]:
    source = SOURCES[name]

    def first(paths: tuple[str, ...]) -> str:
        """Of the first of these files that exists."""
        for path in paths:
            try:
                return read(path)
            except FileNotFoundError:
                continue
        raise FileNotFoundError(f"{name}: none of {', '.join(paths)}")

    paths, pattern = source.version
    versions = [match.group(1) for path in paths if (match := re.search(pattern, first((path,))))]
    functions: dict[str, Signature] = {}
    kinds = ((source.python, python_signature), (source.pybind, pybind_signature), (source.cpp, cpp_signature))
    for table, parse in kinds:
        for places, names in table.items():
            text = first(places)
            functions |= {each: parse(text, each) for each in names}
    names_of_module = {each for path in source.module for each in imported_names(first((path,)))}
    attributes = {
        each: attribute_names(first(places), each) for places, names in source.attributes.items() for each in names
    }
    return {
        "library": name,
        "source": source.url,
        "version": versions[0],
        "module": sorted(names_of_module),
        "attributes": attributes,
        "functions": functions,
    }


def record_torch() -> dict[str, Any]:
    """Schemas of the operators, and the Python functions, of the torch that is installed."""
    import torch
    import torch.distributed._symmetric_memory

    functions: dict[str, Signature] = {}
    for name in ("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset"):
        schema = getattr(torch.ops.symm_mem, name).default._schema
        parameters = [
            {"name": each.name, "how": "any"}
            | ({"default": str(each.default_value)} if each.has_default_value() else {})
            for each in schema.arguments
        ]
        functions[name] = {"parameters": parameters, "returns": None}
    spec = importlib.util.find_spec("torch.distributed._symmetric_memory")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text()
    # The last definition: those before it are overloads for type checkers.
    last = {node.name: ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    for name in ("is_nvshmem_available", "set_backend", "empty", "rendezvous"):
        functions[name] = python_signature(last[name], name)
    return {
        "library": "symmetric_memory",
        "source": "https://github.com/pytorch/pytorch",
        "version": torch.__version__.partition("+")[0],
        "commit": torch.version.git_version,
        "module": sorted(last),
        "attributes": {},
        "functions": functions,
    }


def _git(folder: str, *words: str) -> str:
    done = subprocess.run(["git", f"--git-dir={folder}", *words], capture_output=True, text=True)
    if done.returncode:
        raise FileNotFoundError(done.stderr.strip())
    return done.stdout


def read_wheel(wheel: zipfile.ZipFile) -> Read:
    """Files by their path, and the package's metadata."""

    def read(path: str) -> str:
        ends = f".dist-info/{_METADATA}" if path == _METADATA else path
        names = [name for name in wheel.namelist() if name == path or (path == _METADATA and name.endswith(ends))]
        if not names:
            raise FileNotFoundError(path)
        return wheel.read(names[0]).decode()

    return read


def main(words: list[str]) -> None:
    name, *where = words
    if name == "symmetric_memory":
        found = record_torch()
    elif where[0].endswith(".whl"):
        with zipfile.ZipFile(where[0]) as wheel:
            found = record(name, read_wheel(wheel))
        found["sha256"] = hashlib.sha256(Path(where[0]).read_bytes()).hexdigest()
    else:
        folder, revision = where[0], where[1] if len(where) > 1 else "HEAD"
        found = record(name, lambda path: _git(folder, "show", f"{revision}:{path}"))
        commit, date = _git(folder, "log", "-1", "--format=%H %cs", revision).split()
        found |= {"commit": commit, "committed": date}
    found["recorded"] = datetime.now(UTC).date().isoformat()
    path = FOLDER / f"{name}-{found['version']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
