"""The SwiGLU of ``glu.c`` behind the protocol of ``ops/activations.py``, and as an autograd function."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moefold.errors import BackendError
from moefold.ops.activations import GLU, glu_named, weighted_activation
from moefold.ops.native.compile_c import load

_FORMATS = {torch.bfloat16: "bf16", torch.float32: "f32"}


class NativeSwiGLU:
    """Created once per process by ``native_swiglu``, because it owns a thread pool."""

    def __init__(self) -> None:
        self.library = load("glu")
        self.threads = ThreadPoolExecutor()
        pointer, number = ctypes.c_void_p, ctypes.c_long
        for name in _FORMATS.values():
            getattr(self.library, f"forward_{name}").argtypes = [pointer] * 2 + [number] * 2
            getattr(self.library, f"backward_{name}").argtypes = [pointer] * 6 + [number] * 2

    def forward(self, gate_up_XG: Tensor, act_XF: Tensor) -> None:
        self._run("forward", gate_up_XG, act_XF)

    def backward(
        self, gate_up_XG: Tensor, dact_XF: Tensor, weight_X: Tensor, dgate_up_XG: Tensor, act_XF: Tensor
    ) -> Tensor:
        dweight_X = torch.empty_like(weight_X, dtype=torch.float32)
        self._run("backward", gate_up_XG, dact_XF, weight_X.float(), dgate_up_XG, act_XF, dweight_X)
        return dweight_X

    def _run(self, what: str, *rows: Tensor) -> None:
        """On as many threads as torch uses, each with a chunk of the rows."""
        name = _FORMATS.get(rows[0].dtype)
        if name is None or not all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in rows):
            raise BackendError(f"native swiglu takes contiguous float32 or bfloat16 rows on a CPU, not {rows[0].dtype}")
        call: Callable[..., Any] = getattr(self.library, f"{what}_{name}")
        hidden, threads = rows[0].shape[1] // 2, torch.get_num_threads()

        def work(part: tuple[Tensor, ...]) -> None:
            call(*(tensor.data_ptr() for tensor in part), part[0].shape[0], hidden)

        if threads == 1:
            work(rows)
        elif rows[0].shape[0]:
            # ctypes releases the GIL during the call.
            parts = zip(*(tensor.chunk(threads) for tensor in rows), strict=True)
            list(self.threads.map(work, parts))


@cache
def native_swiglu() -> NativeSwiGLU:
    return NativeSwiGLU()


def native_glu(activation: str) -> GLU:
    """Activations other than swiglu stay in torch."""
    return native_swiglu() if activation == "swiglu" else glu_named(activation)


def native_activation(gate_up_XG: Tensor, weight_X: Tensor | None, activation: str = "swiglu") -> Tensor:
    """The activation of every row, times the row's weight if there is one; others than swiglu stay in torch."""
    if activation != "swiglu" or weight_X is not None or gate_up_XG.dtype not in _FORMATS:
        return weighted_activation(gate_up_XG, weight_X, activation)
    out_XF: Tensor = _Activation.apply(gate_up_XG, native_swiglu())
    return out_XF


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_XG: Tensor, gate: NativeSwiGLU) -> Tensor:
        ctx.save_for_backward(gate_up_XG)
        ctx.gate = gate
        act_XF = gate_up_XG.new_empty(gate_up_XG.shape[0], gate_up_XG.shape[1] // 2)
        gate.forward(gate_up_XG, act_XF)
        return act_XF

    @staticmethod
    def backward(ctx: Any, dact_XF: Tensor) -> tuple[Tensor, None]:
        (gate_up_XG,) = ctx.saved_tensors
        dact_XF, dgate_up_XG = dact_XF.contiguous(), torch.empty_like(gate_up_XG)
        one_X = gate_up_XG.new_ones(gate_up_XG.shape[0], dtype=torch.float32)
        ctx.gate.backward(gate_up_XG, dact_XF, one_X, dgate_up_XG, torch.empty_like(dact_XF))
        return dgate_up_XG, None
