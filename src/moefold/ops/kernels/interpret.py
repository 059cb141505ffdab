"""Run kernels on CPU tensors with Triton's interpreter, one program after the other.

Triton decides at decoration, by an environment variable, whether a kernel is interpreted or compiled. Tests need both
of the same kernel. Inside ``with interpreting():`` every launch ``kernel[grid](...)`` is interpreted, and so is every
function that a kernel calls; outside, nothing changes.

The interpreter computes with numpy and has no bfloat16 matmul: ``tl.dot`` on bfloat16 silently gives wrong numbers, so
a kernel must upcast its operands for the interpreter.

Triton's own interpreter (3.9) narrows wrongly: to bfloat16 it cuts digits off, to float8 it rounds ties away from zero
and loses the carry into the exponent (1.99999 becomes 1), and float8's NaN widens to a number. Here torch converts
between these formats, which rounds to nearest even as a GPU does; float8 saturates, as ``cvt.satfinite`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_plain_splat = interpreter.InterpreterBuilder.create_splat
_plain_convert = interpreter._convert_float
# What torch converts: the type, and that of the bits which the interpreter keeps.
_CONVERTED = {
    tl.float32: (torch.float32, np.uint32),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}
# torch's own cast overflows to infinity.
_E5M2_TOP = 57344.0


@contextmanager
def interpreting() -> Iterator[None]:
    """Not thread-safe: inside, no kernel of this process can be compiled."""
    with (
        patch.object(JITFunction, "run", _launch),
        patch.object(JITFunction, "__call__", _call),
        patch.object(interpreter.InterpreterBuilder, "create_splat", _splat),
        patch.object(interpreter, "_convert_float", _convert),
        triton.knobs.runtime.scope(),
    ):
        triton.knobs.runtime.interpret = True
        scope = interpreter._patch_lang(_language_user)
        try:
            yield
        finally:
            scope.restore()


def _language_user() -> tuple[Any, Any]:
    """The interpreter patches the modules that a function refers to; this one refers to all of them."""
    return tl, core


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    return interpreter.InterpretedFunction(kernel.fn).run(*args, grid=grid, warmup=warmup, **kwargs)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call from inside a kernel. Triton's own path would patch the language again and not restore it."""
    return interpreter.InterpretedFunction(function.fn).rewrite()(*args, **kwargs)


def _splat(builder: Any, kind: Any, value: Any) -> Any:
    """Triton's own turns booleans into integers, which masks do not accept."""
    splat = _plain_splat(builder, kind, value)
    return interpreter.TensorHandle(splat.data.astype(bool), tl.int1) if kind.scalar == tl.int1 else splat


def _convert(data: np.ndarray, source: object, target: object, rounding: object) -> np.ndarray:
    """Numbers of one format as the bits of another, in the shape of ``data``."""
    if source not in _CONVERTED or target not in _CONVERTED:
        return _plain_convert(data, source, target, rounding)
    (wide, _), (narrow, bits) = _CONVERTED[source], _CONVERTED[target]
    values = torch.frombuffer(bytearray(data.tobytes()), dtype=wide) if data.size else torch.empty(0, dtype=wide)
    if target == tl.float8e5:
        values = values.float().clamp(-_E5M2_TOP, _E5M2_TOP)
    return values.to(narrow).view(torch.uint8).numpy().view(bits).reshape(data.shape)
