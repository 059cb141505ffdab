"""The gate of ``gate.c`` behind the contract of ``ops/gates.py``.

r rows, F hidden width, G = 2F.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from moefold.errors import BackendError
from moefold.ops.gates import Gate, gate_named
from moefold.ops.native.build import load

_FORMATS = {torch.bfloat16: "bf16", torch.float32: "f32"}


class NativeSwiglu:
    def __init__(self) -> None:
        self.library = load("gate")
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


def native_gate(activation: str) -> Gate:
    """The others stay in torch."""
    return NativeSwiglu() if activation == "swiglu" else gate_named(activation)
