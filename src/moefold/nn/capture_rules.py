"""What an operation must not do while a CUDA graph is captured.

A captured graph replays kernels with the addresses and numbers that they were launched with. Whatever the host does
beside launching kernels happens once, at capture. So these are refused, on any device:

    host reads     `item`, `tolist`, shapes that depend on data, copies that the host waits for
    random numbers the generator's state on the host would be the same in every replay
    collectives    they are launched between graphs, where timeouts, ledgers and records of hangs see each of them

A CPU never waits for itself, so the operations that would make the host wait are what can be seen without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._ops import OpOverload

_ATEN = torch.ops.aten
# bincount and histc find their size or their range on the host, though no tag says so.
_READS_DATA = {_ATEN._local_scalar_dense, _ATEN.is_nonzero, _ATEN.equal, _ATEN.bincount, _ATEN.histc}
_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# These carry a tag for only one of their uses, which is looked at separately.
_INDEXING = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_}
# Methods that read a tensor on the host.
HOST_READS = frozenset(
    getattr(Tensor, name)
    for name in ("numpy", "__array__", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")
)


def why_refused(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> str | None:
    """Why this operation cannot be captured; None if it can."""
    if op.namespace == "c10d":
        return "is a collective; these are launched between graphs"
    if torch.Tag.nondeterministic_seeded in op.tags and _argument(op, "dropout_p", args, kwargs) != 0.0:
        return "draws random numbers, the same in every replay"
    return why_it_waits(op, args, kwargs)


def why_it_waits(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> str | None:
    """Why the host would wait for the device; None if it would not."""
    packet = op.overloadpacket
    if packet in _INDEXING:
        assert isinstance(args[1], Iterable)
        masks = [index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
        return "with a boolean mask has as many rows as the mask has hits" if masks else None
    if packet is _ATEN.repeat_interleave:
        return "without output_size asks for the sum" if kwargs.get("output_size") is None else None
    if packet in (_ATEN._to_copy, _ATEN.copy_):
        return _blocking_copy(packet, args, kwargs)
    if packet in _READS_DATA or _TAGS & set(op.tags):
        return "reads data on the host"
    return None


def _blocking_copy(packet: object, args: tuple[object, ...], kwargs: dict[str, object]) -> str | None:
    first, source = args[0], args[0] if packet is _ATEN._to_copy else args[1]
    assert isinstance(first, Tensor) and isinstance(source, Tensor)
    target = kwargs.get("device") if packet is _ATEN._to_copy else first.device
    if target is None or torch.device(str(target)) == source.device or kwargs.get("non_blocking"):
        return None
    return f"waits for a copy from {source.device} to {target}"


def _argument(op: OpOverload, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """An argument of this name, given or its default; None if the operation has none."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            given = args[position] if position < len(args) else kwargs.get(name)
            found: object = argument.default_value if given is None else given
            return found
    return None
