"""C for CPUs: the same numbers as its reference in torch, and clear words where it cannot be made."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moefold.errors import BackendError
from moefold.ops.activations import SwiGLU, weighted_activation
from moefold.ops.native import compile_c as build
from moefold.ops.native.glu import NativeSwiGLU, native_activation

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")


@pytest.mark.parametrize("threads", [1, 2])
def test_50_random_shapes_equal_the_reference(threads: int) -> None:
    """float32 to rounding; in bfloat16 the native gate rounds once where torch rounds at every step."""
    gate, before = NativeSwiGLU(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(50):
            compare_with_reference(gate, seed)
    finally:
        torch.set_num_threads(before)


def compare_with_reference(gate: NativeSwiGLU, seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    rows, hidden = chance.choice([0, 1, 5, 64, 129]), chance.choice([1, 7, 16, 33, 256])
    dtype = chance.choice([torch.float32, torch.bfloat16])
    gate_up = (chance.choice([0.1, 3.0, 30.0]) * torch.randn(rows, 2 * hidden)).to(dtype)
    dact, weight = torch.randn(rows, hidden).to(dtype), torch.rand(rows)
    found = []
    for kind, as_dtype in ((gate, dtype), (SwiGLU(), torch.float64)):
        act, again = (torch.empty(rows, hidden, dtype=as_dtype) for _ in range(2))
        dgate_up = torch.empty(rows, 2 * hidden, dtype=as_dtype)
        kind.forward(gate_up.to(as_dtype), act)
        dweight = kind.backward(
            gate_up.to(as_dtype), dact.to(as_dtype), weight.to(dweight_type(as_dtype)), dgate_up, again
        )
        found.append([tensor.double() for tensor in (act, again, dgate_up, dweight)])
    for got, want in zip(*found, strict=True):
        allowed = (2e-6 if dtype == torch.float32 else 2**-8) * want.norm() + 1e-30
        assert (got - want).norm() <= allowed, (seed, dtype, rows, hidden)


def dweight_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dense_layers_have_it_too(dtype: torch.dtype) -> None:
    """float64, and rows with weights, stay in torch."""
    gate_up, found = torch.randn(9, 14).to(dtype).requires_grad_(), []
    for activation in (native_activation, weighted_activation):
        made = activation(gate_up, None, "swiglu")
        found.append((made, *torch.autograd.grad(made, gate_up, torch.ones_like(made))))
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 2**-7 * want.norm()
    weight = torch.rand(9)
    assert torch.equal(native_activation(gate_up, weight), weighted_activation(gate_up, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[torch.nan, 1.0, 2.0, 1.0], [1.0, 3.0, torch.nan, 1.0]]).to(dtype)
    act, dgate_up = torch.empty(2, 2, dtype=dtype), torch.empty(2, 4, dtype=dtype)
    gate = NativeSwiGLU()
    gate.forward(gate_up, act)
    assert act.isnan().tolist() == [[True, False], [True, False]]
    dweight = gate.backward(gate_up, torch.ones(2, 2, dtype=dtype), torch.ones(2), dgate_up, act)
    assert dweight.isnan().all() and dgate_up[0, 0].isnan() and dgate_up[1, 0].isnan()


def test_float64_and_strided_rows_are_refused() -> None:
    gate = NativeSwiGLU()
    with pytest.raises(BackendError, match=r"contiguous float32 or bfloat16 rows on a CPU, not torch\.float64"):
        gate.forward(torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(BackendError, match="contiguous"):
        gate.forward(torch.zeros(2, 8)[:, ::2], torch.zeros(2, 2))


def test_it_is_compiled_once_into_a_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load.cache_clear()
    build.load("glu")
    (made,) = (tmp_path / "moefold" / "native").iterdir()
    assert made.parent.stat().st_mode & 0o077 == 0
    written = made.stat().st_mtime_ns
    build.load.cache_clear()
    build.load("glu")
    assert made.stat().st_mtime_ns == written


def test_without_a_compiler_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.load.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BackendError, match=r"kernels\.backend: native needs a C compiler.*use torch"):
        build.load("glu")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BackendError, match=r"cannot compile glu.*no such flag"):
        build.load("glu")
