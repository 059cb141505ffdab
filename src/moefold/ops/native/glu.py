"""The gate of ``gate.c`` behind the contract of ``ops/glu.py``, and as an operation of its own for dense layers.

r rows, F hidden width, G = 2F.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moefold.errors import BackendError
from moefold.ops.activations import weighted_activation
from moefold.ops.glu import Gate, gate_named
from moefold.ops.native.compile_c import load

_FORMATS = {torch.bfloat16: "bf16", torch.float32: "f32"}


class NativeSwiglu:
    """Made once per process by ``native_swiglu``: its helpers are threads."""

    def __init__(self) -> None:
        self.library = load("glu")
        self.helpers = ThreadPoolExecutor()
        pointer, number = ctypes.c_void_p, ctypes.c_long
        for name in _FORMATS.values():
            getattr(self.library, f"forward_{name}").argtypes = [pointer] * 2 + [number] * 2
            getattr(self.library, f"backward_{name}").argtypes = [pointer] * 6 + [number] * 2

    def forward(self, gate_up_rG: Tensor, act_rF: Tensor) -> None:
        self._run("forward", gate_up_rG, act_rF)

    def backward(
        self, gate_up_rG: Tensor, dact_rF: Tensor, weight_r: Tensor, dgate_up_rG: Tensor, act_rF: Tensor
    ) -> Tensor:
        dweight_r = torch.empty_like(weight_r, dtype=torch.float32)
        self._run("backward", gate_up_rG, dact_rF, weight_r.float(), dgate_up_rG, act_rF, dweight_r)
        return dweight_r

    def _run(self, what: str, *rows: Tensor) -> None:
        """On as many threads as torch has, each with its share of the rows."""
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
            # A call leaves Python's lock.
            parts = zip(*(tensor.chunk(threads) for tensor in rows), strict=True)
            list(self.helpers.map(work, parts))


@cache
def native_swiglu() -> NativeSwiglu:
    return NativeSwiglu()


def native_gate(activation: str) -> Gate:
    """The others stay in torch."""
    return native_swiglu() if activation == "swiglu" else gate_named(activation)


def native_activation(gate_up_rG: Tensor, weight_r: Tensor | None, activation: str = "swiglu") -> Tensor:
    """The activation of every row, times the row's weight if there is one; others than swiglu stay in torch."""
    if activation != "swiglu" or weight_r is not None or gate_up_rG.dtype not in _FORMATS:
        return weighted_activation(gate_up_rG, weight_r, activation)
    made_rF: Tensor = _Activation.apply(gate_up_rG, native_swiglu())
    return made_rF


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_rG: Tensor, gate: NativeSwiglu) -> Tensor:
        ctx.save_for_backward(gate_up_rG)
        ctx.gate = gate
        act_rF = gate_up_rG.new_empty(gate_up_rG.shape[0], gate_up_rG.shape[1] // 2)
        gate.forward(gate_up_rG, act_rF)
        return act_rF

    @staticmethod
    def backward(ctx: Any, dact_rF: Tensor) -> tuple[Tensor, None]:
        (gate_up_rG,) = ctx.saved_tensors
        dact_rF, dgate_up_rG = dact_rF.contiguous(), torch.empty_like(gate_up_rG)
        one_r = gate_up_rG.new_ones(gate_up_rG.shape[0], dtype=torch.float32)
        ctx.gate.backward(gate_up_rG, dact_rF, one_r, dgate_up_rG, torch.empty_like(dact_rF))
        return dgate_up_rG, None
