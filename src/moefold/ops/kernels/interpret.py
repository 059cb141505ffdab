"""Run kernels on CPU tensors with Triton's interpreter, one program after the other.

Triton decides at decoration, by an environment variable, whether a kernel is interpreted or compiled. Tests need both
of the same kernel. Inside ``with interpreting():`` every launch ``kernel[grid](...)`` is interpreted, and so is every
function that a kernel calls; outside, nothing changes.

The interpreter computes with numpy and has no bfloat16 matmul: ``tl.dot`` on bfloat16 silently gives wrong numbers, so
a kernel must upcast its operands for the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_plain_splat = interpreter.InterpreterBuilder.create_splat


@contextmanager
def interpreting() -> Iterator[None]:
    """Not thread-safe: inside, no kernel of this process can be compiled."""
    with (
        patch.object(JITFunction, "run", _launch),
        patch.object(JITFunction, "__call__", _call),
        patch.object(interpreter.InterpreterBuilder, "create_splat", _splat),
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
