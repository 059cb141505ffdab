"""The reference of a CUDA graph on any device: operations recorded once, and run again with the same tensors.

A tape holds every operation that was dispatched while it was recorded, below autograd, with its arguments and results.
A replay runs them again: a result is written into the memory that it had, a view needs nothing, an operation in place
is done again in place. No line of Python of the recorded function runs. So a tape is wrong where a CUDA graph would
be: if an input was not copied to where the graph reads it, if the host computed something that it baked in, if memory
of the graph was used again too early. On CPUs `kernels.graphs` runs on tapes, which gain nothing: they are there to be
compared with plain calls.

Unlike in a graph's pool, results that nothing needs later keep their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from moefold.errors import BackendError
from moefold.nn.capture_rules import HOST_READS, why_refused

T = TypeVar("T")


class _Step(NamedTuple):
    op: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    # Memory that a replay writes; none of views and of operations in place.
    results: tuple[Tensor | None, ...]


class Tape:
    """The recorded operations; ``replay`` runs them."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []

    @torch.no_grad()
    def replay(self) -> None:
        for op, args, kwargs, results in self.steps:
            found = op(*args, **kwargs)
            for held, new in zip(results, tree_leaves(found)):
                if held is not None:
                    held.copy_(new)

    @property
    def trace(self) -> list[str]:
        """Every operation with the shapes of its results."""
        return [f"{step.op} {[None if x is None else tuple(x.shape) for x in step.results]}" for step in self.steps]


class TapeEngine:
    """``GraphEngine`` by tapes. The first use of a region is recorded: nothing has to be warm."""

    needs_warmup = False

    def new_pool(self) -> None:
        """Results have memory of their own."""

    def capture(self, work: Callable[[], T], pool: object) -> tuple[T, Tape]:
        tape = Tape()
        with _Methods(), _Recorder(tape):
            return work(), tape


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and disabling dynamo for every operation takes time."""
        return False

    def __torch_dispatch__(
        self,
        op: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        refuse(op, args, kwargs)
        result = op(*args, **kwargs)
        leaves = tree_leaves(result)
        if not op.is_view and (op._schema.is_mutable or any(isinstance(leaf, Tensor) for leaf in leaves)):
            known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            # Aliases: what is recorded belongs to no autograd graph, and its versions are not counted.
            results = tuple(
                x.detach() if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known else None
                for x in leaves
            )
            if op._schema.is_mutable or any(x is not None for x in results):
                args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
                self.tape.steps.append(_Step(op, args, kwargs, results))
        return result


class _Methods(TorchFunctionMode):
    """On a CPU these read memory, and no operation says so."""

    def __torch_function__(
        self,
        func: Callable[..., T],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> T:
        if func in HOST_READS:
            raise BackendError(_refused(f"Tensor.{func.__name__}", "reads values on the host"))
        return func(*args, **(kwargs or {}))


def refuse(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Raises where a graph could not hold this operation."""
    if reason := why_refused(op, args, kwargs):
        raise BackendError(_refused(str(op), reason))


def _refused(what: str, reason: str) -> str:
    return (
        f"kernels.graphs: {what} {reason}, and cannot be captured; take the phase that does it out of "
        "kernels.graph_scope, or use kernels.graphs none"
    )
