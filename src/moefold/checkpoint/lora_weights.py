"""Weights with adapters beside them, and weights with adapters merged into them: both read tensor by tensor.

`WithAdapters` is what fine-tuning starts from: the weights of a model without adapters, and adapters that are new (B is
zero, so the model is the same at first) or were trained before. Frozen weights have the format in which they are
gathered, trained ones that of the parameters. `Merged` is what other programs load: W + scale * B A, and no adapters.
`LiveAdapters` merges into the weights of a sharded model while they are streamed: A and B of some boxes of weights are
gathered from the ranks that hold them, and each rank adds their product to its own elements of these boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.blueprint.lora_adapters import adapter_name, is_adapter
from moefold.blueprint.parameters import parameters
from moefold.checkpoint.tensor_spec import Box, TensorSource, inside, intersection, sizes_of, whole
from moefold.comm.collectives import start_all_reduce
from moefold.config.model import ModelConfig
from moefold.config.run import RunConfig
from moefold.nn.init import init_values
from moefold.nn.low_rank import merged_reference
from moefold.parallel.parallelize import LocalModel, frozen_dtypes
from moefold.precision.dtypes import TORCH_FORMATS

_PARAMETER = "parameter/"


class WithAdapters:
    """``source``: the model without adapters. ``trained``: values of adapters by name; those not in it are new."""

    def __init__(self, source: TensorSource, run: RunConfig, trained: Mapping[str, Tensor] | None = None) -> None:
        self._source, self._run, self._values = source, run, dict(trained or {})
        self._specs = {_PARAMETER + spec.name: spec for spec in parameters(run.model)}
        self._frozen = {_PARAMETER + name: dtype for name, dtype in frozen_dtypes(run).items()}

    def names(self) -> Sequence[str]:
        return (*self._specs, *(name for name in self._source.names() if not name.startswith(_PARAMETER)))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._specs[name].shape if name in self._specs else self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        if name not in self._specs:
            return self._source.dtype(name)
        return self._frozen.get(name, TORCH_FORMATS[self._run.precision.params])

    def read(self, name: str, box: Box | None = None) -> Tensor:
        if not is_adapter(name):
            return self._source.read(name, box).to(self.dtype(name))
        spec = self._specs[name]
        box = whole(spec.shape) if box is None else box
        if spec.name in self._values:
            return self._values[spec.name][box].to(self.dtype(name))
        values = torch.empty([part.stop - part.start for part in box], dtype=self.dtype(name))
        init_values(spec.kind, self._run.seed, spec.name, spec.shape, box, 0.0, values)
        return values


class Merged:
    """``source``: of ``model``, which has adapters. What is read is of `merged.model`, which has none."""

    def __init__(self, source: TensorSource, model: ModelConfig) -> None:
        assert model.lora is not None
        self._source, self._scale = source, model.lora.scale
        self.model = replace(model, lora=None)
        names = set(source.names())
        self._adapters = {
            _PARAMETER + spec.name: pair
            for spec in parameters(self.model)
            if (pair := _pair(_PARAMETER + spec.name))[0] in names
        }
        self.shape, self.dtype = source.shape, source.dtype

    def names(self) -> Sequence[str]:
        return [name for name in self._source.names() if not is_adapter(name)]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """In the dtype of the weight; the sum is computed in at least float32. A box of experts reads theirs alone."""
        weight = self._source.read(name, box)
        if name not in self._adapters:
            return weight
        box = whole(self.shape(name)) if box is None else box
        a_name, b_name = self._adapters[name]
        stacked = len(self.shape(a_name)) > 2
        first = box[:1] if stacked else ()
        a, b = (self._wide(part, first) for part in (a_name, b_name))
        rows = (*(part.stop - part.start for part in first), *self.shape(name)[len(first) :])
        delta = merged_reference(torch.zeros(rows, dtype=a.dtype), a, b, self._scale)
        within = (*(slice(0, part.stop - part.start) for part in first), *box[len(first) :])
        return (weight.to(a.dtype) + delta[within]).to(weight.dtype)

    def _wide(self, name: str, first: Box) -> Tensor:
        shape = self.shape(name)
        values = self._source.read(name, (*first, *whole(shape)[len(first) :]))
        return values.to(torch.promote_types(values.dtype, torch.float32))


class AdapterPair(NamedTuple):
    """A [..., r, in] and B [..., r] of a box of a weight, in at least float32."""

    a: Tensor
    b: Tensor


class LiveAdapters:
    """``held``: boxes of the adapters for which this rank is the primary replica, by name."""

    def __init__(self, local_model: LocalModel, held: Mapping[str, Sequence[tuple[Box, Tensor]]]) -> None:
        run = local_model.run
        assert run.model.lora is not None
        self._held, self._device, self._scale = held, local_model.device, run.model.lora.scale
        self._world = local_model.groups["world"]
        self._above = {spec.name: len(spec.shape) - 2 for spec in parameters(run.model) if spec.kind == "lora_a"}
        self._rank, self._frozen = slice(0, run.model.lora.rank), frozen_dtypes(run)
        self._main = local_model.sharding.main_dtype

    @torch.no_grad()
    def gather(self, boxes: Sequence[tuple[str, Box]]) -> list[AdapterPair | None]:
        """Of boxes of weights, by name; None for a weight without adapters. Collective: all ranks ask for the same.

        As in the stream itself, exactly one rank writes each element, and buffers are summed as integers.
        """
        parts = [part for weight, box in boxes for part in self._parts(weight, box)]
        ends, end = [], 0
        for name, box in parts:
            end += -(-prod(sizes_of(box)) * self._dtype(name).itemsize // 16) * 16
            ends.append(end)
        flat = torch.zeros(end // 4, dtype=torch.int32, device=self._device)
        found = [
            self._filled(name, box, flat.view(torch.uint8)[start:])
            for (name, box), start in zip(parts, [0, *ends], strict=False)
        ]
        if end:
            for work in start_all_reduce(flat, self._world):
                work.wait()
        values = iter([each.to(torch.promote_types(each.dtype, torch.float32)) for each in found])
        return [AdapterPair(next(values), next(values)) if self._parts(*each) else None for each in boxes]

    def merge(self, values: Tensor, common: Box, pair: AdapterPair, box: Box) -> Tensor:
        """``values``: those of a weight in ``common``, which lies in ``box``, the box of the pair. In their dtype."""
        within = inside(common, box)
        a = pair.a[(*within[: pair.a.dim() - 2], slice(None), within[-1])]
        return merged_reference(values.to(a.dtype), a, pair.b[within[:-1]], self._scale).to(values.dtype)

    def _parts(self, weight: str, box: Box) -> tuple[tuple[str, Box], ...]:
        """What a box of a weight needs of A and of B; nothing if it has no adapters."""
        a_name, b_name = _pair(weight)
        if a_name not in self._above:
            return ()
        return (a_name, (*box[: self._above[a_name]], self._rank, box[-1])), (b_name, (*box[:-1], self._rank))

    def _dtype(self, name: str) -> torch.dtype:
        return self._frozen.get(name, self._main)

    def _filled(self, name: str, box: Box, memory: Tensor) -> Tensor:
        """A view of ``memory`` with this rank's elements of the box."""
        dtype, sizes = self._dtype(name), sizes_of(box)
        view = memory[: prod(sizes) * dtype.itemsize].view(dtype).view(sizes)
        for own, values in self._held.get(name, ()):
            common = intersection(own, box)
            if common is not None:
                view[inside(common, box)] = values[inside(common, own)]
        return view


def _pair(weight: str) -> tuple[str, str]:
    return adapter_name(weight, "lora_a"), adapter_name(weight, "lora_b")
