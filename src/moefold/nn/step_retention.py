"""What a block keeps of its named steps for the backward pass: kept, discarded and recomputed, offloaded, or paged.

A module hands every step to a ``Retention``: ``q, k, v = retain.step("mla_up", make, latents)``. ``KeepAll`` calls the
function and nothing else. ``StepRetention`` decides what is stored in place of each tensor that autograd saves. torch
applies only the innermost pair of saved-tensor hooks, so one pair decides everything: ``scope`` installs it around a
block's forward (or one phase of it), where the consumers of steps run, and ``step`` the same around the step itself.

**discard** (output-discarding recomputation, the fine-grained recomputation of Megatron Core): what is stored is a
``Remade``, how to make the tensor again: the step's function and its inputs, which are saved anyway. Nothing else holds
the output, so it is freed by reference count. The graph is that of the plain forward, hence gradients are equal to the
bit. The first ``Remade`` that the backward asks for runs the function once and fills all others of the same step, those
of the step's own saved tensors too; each is freed with the node that saved it. The input of a step may itself be the
output of a discarded step, or be offloaded: inputs are stored through the same hook.

**offload**: what is stored is an ``Away``, a view of a storage that waits in the host's memory (``nn/offload.py``).

**page**: what is stored is a ``Paged``, a view of rows that wait in pages of a pool (``nn/paged_stash.py``), of buffers
whose number of rows only the device knows. ``of_rows`` says how many there are.

A storage is known by its address and a weak reference, and forgotten when it is freed: an address is used again.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from moefold.config.memory import MemoryConfig, RetainedStep
from moefold.nn.offload import Away, HostPool, Offload, OffloadGroup, Slot
from moefold.nn.paged_stash import PagedRows, PagedStash

T = TypeVar("T", Tensor, tuple[Tensor, ...], tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor])


# Steps without weights, whose kernels save tensors of their own: all of those are offloaded.
SAVES_ITS_OWN = frozenset({"core", "activation"})


class Retention(Protocol):
    def step(self, name: RetainedStep, make: Callable[..., T], *inputs: Tensor) -> T:
        """``make(*inputs)``. It may be called again in the backward pass: no collective, no counting, and tensors that
        should not stay alive for it must be among ``inputs``, and so must weights that it reads: what it saves of its
        inputs is theirs, and FSDP frees a weight's memory when a forward ends."""
        ...

    def received(self, name: RetainedStep, tensor: Tensor) -> Tensor:
        """A tensor that belongs to a step and is not its output: what a collective gave, or what the step itself saves.
        It is offloaded with the step, and never discarded."""
        ...

    def of_rows(self, rows_per_expert_e: Tensor) -> Retention:
        """The same for steps on buffers of which only the first rows are there, as many as these are in all."""
        ...

    def scope(self) -> AbstractContextManager[None]:
        """Around a forward that uses outputs of steps."""
        ...


class KeepAll:
    """Autograd as it is."""

    def step(self, name: RetainedStep, make: Callable[..., T], *inputs: Tensor) -> T:
        return make(*inputs)

    def received(self, name: RetainedStep, tensor: Tensor) -> Tensor:
        return tensor

    def of_rows(self, rows_per_expert_e: Tensor) -> Retention:
        return self

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()


KEEP_ALL = KeepAll()


class View:
    """Where a tensor lies in its storage."""

    __slots__ = ("offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, self.offset)


class Remade:
    """Stands for a tensor that a step makes again: the view of an output, or the n-th tensor that the step saved."""

    __slots__ = ("__weakref__", "number", "recipe", "tensor", "view")

    def __init__(self, recipe: _Recipe, number: int, view: View | None) -> None:
        self.recipe, self.number, self.view = recipe, number, view
        self.tensor: Tensor | None = None
        recipe.wanted.append(weakref.ref(self))

    def get(self) -> Tensor:
        if self.tensor is None:
            self.recipe.run()
        assert self.tensor is not None
        return self.tensor


class Paged:
    """Stands for a view of rows that wait in pages."""

    __slots__ = ("rows", "view")

    def __init__(self, rows: PagedRows, view: View) -> None:
        self.rows, self.view = rows, view

    def get(self) -> Tensor:
        return self.view.of(self.rows.get())


Stored = Tensor | Remade | Away | Paged


class _Recipe:
    """How to make a step's output and its saved tensors again, once."""

    def __init__(
        self, name: RetainedStep, make: Callable[..., object], inputs: list[Stored], grads: list[bool]
    ) -> None:
        self.name, self.make, self.inputs, self.grads = name, make, inputs, grads
        self.wanted: list[weakref.ref[Remade]] = []
        self.num_saved = 0
        self.counts: Counter[RetainedStep] | None = None

    def run(self) -> None:
        wanted = [remade for reference in self.wanted if (remade := reference()) is not None]
        inside = {remade.number for remade in wanted if remade.view is None}
        saved: dict[int, Tensor] = {}
        numbers = iter(range(self.num_saved))

        def capture(tensor: Tensor) -> None:
            number = next(numbers)
            if number in inside:
                saved[number] = tensor.detach()

        def nothing(_: None) -> Tensor:
            raise AssertionError("the graph of a recomputed step has no backward")

        inputs = [get(each).detach().requires_grad_(grad) for each, grad in zip(self.inputs, self.grads, strict=True)]
        with torch.enable_grad(), saved_tensors_hooks(capture, nothing):
            outputs = _as_tuple(self.make(*inputs))
        for remade in wanted:
            view = remade.view
            remade.tensor = saved[remade.number] if view is None else view.of(outputs[remade.number].detach())
        if self.counts is not None:
            self.counts[self.name] += 1
        # Recipes are held by what they stand for, until its node is freed; the inputs are not needed that long.
        self.inputs, self.make, self.wanted = [], _made_already, []


def _made_already(*_: Tensor) -> object:
    raise AssertionError("a discarded step is recomputed once")


def get(stored: Stored) -> Tensor:
    return stored if isinstance(stored, Tensor) else stored.get()


def _as_tuple(outputs: object) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)  # type: ignore[arg-type]


class _Known:
    """A storage that belongs to a step: output ``number`` of a recipe, or one to be offloaded, or, with a number of
    rows, to be paged."""

    __slots__ = ("dtype", "num_rows", "number", "paged", "recipe", "slot", "storage", "whole")

    def __init__(self, tensor: Tensor, recipe: _Recipe | None, number: int, num_rows: Tensor | None) -> None:
        self.dtype, self.recipe, self.number = tensor.dtype, recipe, number
        self.whole, self.num_rows = View(tensor), num_rows
        self.slot: weakref.ref[Slot] | None = None
        self.paged: weakref.ref[PagedRows] | None = None
        self.storage: weakref.ref[torch.UntypedStorage] | None = None


class StepRetention:
    """``choices``: of each step; steps that are not in it are kept. ``stash``: where steps are paged."""

    def __init__(self, choices: Mapping[RetainedStep, str], offload: Offload, stash: PagedStash | None = None) -> None:
        self.choices = dict(choices)
        self.offload, self.stash = offload, stash
        # How often steps were recomputed.
        self.recomputed: Counter[RetainedStep] = Counter()
        self._known: dict[int, _Known] = {}
        # Of the thread: phases that communicate may run on another one.
        self._here = threading.local()

    def step(self, name: RetainedStep, make: Callable[..., T], *inputs: Tensor, num_rows: Tensor | None = None) -> T:
        choice = self._choice(name, num_rows)
        group = self._group
        if choice == "keep" or group is None or not torch.is_grad_enabled():
            return make(*inputs)
        given = {_address(tensor) for tensor in inputs}
        if choice in ("offload", "page"):

            def send(tensor: Tensor) -> Stored:
                if choice == "offload" and name in SAVES_ITS_OWN and _address(tensor) not in given:
                    self.received(name, tensor)
                return self._store(tensor, group)

            with saved_tensors_hooks(send, get):
                outputs = make(*inputs)
            for output in _as_tuple(outputs):
                if _address(output) not in given:
                    self.received(name, output, num_rows)
            return outputs
        stored = [self._store(tensor.detach(), group) for tensor in inputs]
        recipe = _Recipe(name, make, stored, [tensor.requires_grad for tensor in inputs])
        recipe.counts = self.recomputed

        def discard(tensor: Tensor) -> Stored:
            number = recipe.num_saved
            recipe.num_saved += 1
            address = _address(tensor)
            if address in given or address in self._known or isinstance(tensor, nn.Parameter):
                return self._store(tensor, group)
            return Remade(recipe, number, None)

        with saved_tensors_hooks(discard, get):
            outputs = make(*inputs)
        for number, output in enumerate(_as_tuple(outputs)):
            # An output that is its input is not discarded: it is kept anyway.
            if _address(output) not in given:
                self._know(output, recipe, number)
        return outputs

    def received(self, name: RetainedStep, tensor: Tensor, num_rows: Tensor | None = None) -> Tensor:
        """Parameters are never sent, nor numbers of rows and experts, nor what is too small to be worth a copy."""
        choice = self._choice(name, num_rows)
        if self._group is None or _address(tensor) in self._known or isinstance(tensor, nn.Parameter):
            return tensor
        if choice == "page":
            self._know(tensor, None, 0, num_rows)
        elif choice == "offload" and self.offload.is_sent(tensor):
            self._know(tensor, None, 0)
        return tensor

    def of_rows(self, rows_per_expert_e: Tensor) -> Retention:
        return self if self.stash is None else _OfRows(self, rows_per_expert_e.sum())

    def _choice(self, name: RetainedStep, num_rows: Tensor | None) -> str:
        """Rows whose number the host knows are in buffers of that size, which are kept as they are."""
        choice = self.choices.get(name, "keep")
        return "keep" if choice == "page" and num_rows is None else choice

    @contextmanager
    def scope(self) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        group = self.offload.new_group()
        before, self._here.group = self._group, group
        try:
            with saved_tensors_hooks(lambda tensor: self._store(tensor, group), get):
                yield
        finally:
            self._here.group = before
        self.offload.send(group)

    @property
    def _group(self) -> OffloadGroup | None:
        return getattr(self._here, "group", None)

    def _store(self, tensor: Tensor, group: OffloadGroup) -> Stored:
        """What autograd holds in place of a saved tensor."""
        known = self._known.get(_address(tensor))
        if known is None or known.dtype != tensor.dtype:
            return tensor
        if known.recipe is not None:
            return Remade(known.recipe, known.number, View(tensor))
        if known.num_rows is not None:
            return Paged(self._paged(known, tensor), View(tensor))
        slot = None if known.slot is None else known.slot()
        if slot is None:
            slot = group.add(tensor)
            known.slot = weakref.ref(slot)
        return Away(slot, tensor)

    def _paged(self, known: _Known, tensor: Tensor) -> PagedRows:
        """The rows of the whole storage, once."""
        assert self.stash is not None and known.num_rows is not None
        paged = None if known.paged is None else known.paged()
        if paged is None:
            paged = self.stash.keep(known.whole.of(tensor.detach()), known.num_rows)
            known.paged = weakref.ref(paged)
        return paged

    def _know(self, tensor: Tensor, recipe: _Recipe | None, number: int, num_rows: Tensor | None = None) -> None:
        key, storage = _address(tensor), tensor.untyped_storage()
        known = self._known[key] = _Known(tensor, recipe, number, num_rows)

        def forget(_: object) -> None:
            if self._known.get(key) is known:
                del self._known[key]

        known.storage = weakref.ref(storage, forget)


class _OfRows:
    """A ``StepRetention`` for buffers of which only the first ``num_rows`` rows are there."""

    def __init__(self, retention: StepRetention, num_rows: Tensor) -> None:
        self.retention, self.num_rows = retention, num_rows

    def step(self, name: RetainedStep, make: Callable[..., T], *inputs: Tensor) -> T:
        return self.retention.step(name, make, *inputs, num_rows=self.num_rows)

    def received(self, name: RetainedStep, tensor: Tensor) -> Tensor:
        return self.retention.received(name, tensor, self.num_rows)

    def of_rows(self, rows_per_expert_e: Tensor) -> Retention:
        return self.retention.of_rows(rows_per_expert_e)

    def scope(self) -> AbstractContextManager[None]:
        return self.retention.scope()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def retention_for(memory: MemoryConfig, device: torch.device, stash: PagedStash | None = None) -> StepRetention | None:
    """What a run keeps of its steps; None where it keeps everything."""
    # What is kept narrow is the matmuls' own affair (`precision/narrow_inputs.py`).
    choices = {step: choice for step, choice in memory.retained().items() if choice in ("discard", "offload", "page")}
    limit = None if memory.host_gib is None else int(memory.host_gib * 2**30)
    pool = HostPool(limit, pinned=device.type == "cuda")
    return StepRetention(choices, Offload(pool, device), stash) if choices else None
