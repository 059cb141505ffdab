"""Run kernels on CPU tensors, in this process, one program after the other.

Triton has an interpreter, but decides at decoration, by an environment variable, whether a kernel is interpreted or
compiled. Tests want both of the same kernel. Inside ``with interpreting():`` every launch ``kernel[grid](...)`` is
interpreted, and so is every function that a kernel calls; outside, nothing has changed.

The interpreter computes with numpy and knows no bfloat16 product: a kernel that calls ``tl.dot`` on bfloat16 gets
numbers without meaning. It raises nothing, so a kernel must widen its operands for the interpreter.
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
    """Not for threads: while it lasts, nothing in this process can be compiled."""
    with (
        patch.object(JITFunction, "run", _launch),
        patch.object(JITFunction, "__call__", _call),
        patch.object(interpreter.InterpreterBuilder, "create_splat", _splat),
        triton.knobs.runtime.scope(),
    ):
        triton.knobs.runtime.interpret = True
        scope = interpreter._patch_lang(_sees_the_language)
        try:
            yield
        finally:
            scope.restore()


def _sees_the_language() -> tuple[Any, Any]:
    """The interpreter replaces the language that a function sees; this one sees all of it."""
    return tl, core


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    return interpreter.InterpretedFunction(kernel.fn).run(*args, grid=grid, warmup=warmup, **kwargs)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call from inside a kernel. Triton's own interpreter would replace the language once more, and leave it so."""
    return interpreter.InterpretedFunction(function.fn).rewrite()(*args, **kwargs)


def _splat(builder: Any, kind: Any, value: Any) -> Any:
    """Triton's own makes whole numbers of the answer to a comparison, and a mask may not be made of these."""
    splat = _plain_splat(builder, kind, value)
    return interpreter.TensorHandle(splat.data.astype(bool), tl.int1) if kind.scalar == tl.int1 else splat
