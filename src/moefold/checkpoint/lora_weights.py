"""Weights with adapters beside them, and weights with adapters merged into them: both read tensor by tensor.

`WithAdapters` is what fine-tuning starts from: the weights of a model without adapters, and adapters that are new (B is
zero, so the model is the same at first) or were trained before. Frozen weights have the format in which they are
gathered, trained ones that of the parameters. `Merged` is what other programs load: W + scale * B A, and no adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moefold.blueprint.lora_adapters import adapter_name, is_adapter
from moefold.blueprint.parameters import parameters
from moefold.checkpoint.tensor_spec import Box, TensorSource, whole
from moefold.config.model import ModelConfig
from moefold.config.run import RunConfig
from moefold.nn.init import init_values
from moefold.nn.low_rank import merged_reference
from moefold.parallel.parallelize import frozen_dtypes
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


def _pair(weight: str) -> tuple[str, str]:
    return adapter_name(weight, "lora_a"), adapter_name(weight, "lora_b")
