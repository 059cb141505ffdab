"""Which moefold tensor is which Hugging Face tensor, as data that is read in both directions.

A rule has a moefold name, an HF name, and how their dims relate:

    NameRule("head.weight", "lm_head.weight")                                       the same tensor
    NameRule("ffn.gate_up[1]", "ffn.up_proj.weight")                                HF's is one slice of moefold's
    NameRule("experts.down[{e}]", "experts.{e}.down_proj.weight")                   one slice for each e
    NameRule("experts.gate_up", "experts.gate_up_proj", "e 2 f d = e d (f 2)")      other order, dims merged
    NameRule("router.expert_bias", "gate.bias", "e = () e")                         HF's has a dim of 1 in front
    NameRule("mtp.{k}.join.weight", "layers.{after}.eh_proj.weight")                {after} = num_layers + k

Rules only permute and reshape, so each is its own inverse and is written once. A family of models is a list of rules.
Expanded for a model's sizes, they must cover each moefold tensor exactly once and use no HF name twice; `hf_tensors`
checks this before anything is read or written. Where a family stores a tensor several times, a `CopyRule` says which
moefold tensor the others repeat.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod

from torch import Tensor

from moefold.blueprint.parameters import ParameterSpec, buffers, parameters
from moefold.config.model import ModelConfig
from moefold.errors import ConversionError, Problem

Shape = tuple[int, ...]
Box = tuple[slice, ...]


@dataclass(frozen=True)
class NameRule:
    """`moefold_name` may end in the indices of a slice; {x} is a number, the same in both names."""

    moefold_name: str
    hf_name: str
    dims: str = ""

    @property
    def name(self) -> str:
        return self.moefold_name.partition("[")[0]

    @property
    def slots(self) -> tuple[str, ...]:
        inner = self.moefold_name.partition("[")[2].rstrip("]")
        return tuple(word.strip() for word in inner.split(",")) if inner else ()

    def matches(self, name: str) -> dict[str, str] | None:
        found = self._pattern.fullmatch(name)
        return None if found is None else found.groupdict()

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", re.escape(self.name)))


@dataclass(frozen=True)
class CopyRule:
    """An HF tensor that repeats a moefold tensor, once per MTP module."""

    moefold_name: str
    hf_name: str


@dataclass(frozen=True)
class HfTensor:
    """An HF tensor (or, with `hf_index`, a slice of one) and the slice of a moefold tensor that it is."""

    moefold_name: str
    index: tuple[int, ...]
    shape: Shape
    hf_name: str
    dims: Dims
    # Leading indices into the HF tensor.
    hf_index: tuple[int, ...] = ()

    @property
    def hf_shape(self) -> Shape:
        return self.dims.hf_shape(self.shape)

    @property
    def box(self) -> Box:
        """The slice as a box of the moefold tensor."""
        return (*(slice(i, i + 1) for i in self.index), *(slice(0, size) for size in self.shape))

    def to_hf(self, tensor: Tensor) -> Tensor:
        """``tensor`` has the size of ``box``."""
        return self.dims.to_hf(tensor.reshape(self.shape))

    def from_hf(self, stored: Tensor) -> Tensor:
        return self.dims.from_hf(stored, self.shape)

    def split(self) -> Iterator[HfTensor]:
        """One per expert where both tensors stack experts in dim 0, which needs less memory at a time."""
        if len(self.shape) < 3 or self.dims.groups[0] != (0,):
            yield self
            return
        inner = Dims(tuple(tuple(dim - 1 for dim in group) for group in self.dims.groups[1:]))
        for row in range(self.shape[0]):
            index, hf_index = (*self.index, row), (*self.hf_index, row)
            yield HfTensor(self.moefold_name, index, self.shape[1:], self.hf_name, inner, hf_index)


@dataclass(frozen=True)
class Dims:
    """`groups[k]` are the moefold dims that are merged into HF dim k, in order."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(dim for group in self.groups for dim in group)

    def hf_shape(self, shape: Shape) -> Shape:
        return tuple(prod(shape[dim] for dim in group) for group in self.groups)

    def to_hf(self, tensor: Tensor) -> Tensor:
        return tensor.permute(self.order).reshape(self.hf_shape(tuple(tensor.shape)))

    def from_hf(self, stored: Tensor, shape: Shape) -> Tensor:
        split = stored.reshape([shape[dim] for dim in self.order])
        return split.permute([self.order.index(dim) for dim in range(len(shape))])


def parse_dims(text: str, rank: int) -> Dims:
    """`"e 2 f d = e d (f 2)"`, moefold's dims on the left; "" means the same dims in the same order."""
    if not text:
        return Dims(tuple((dim,) for dim in range(rank)))
    left, right = (side.strip() for side in text.split("="))
    dims = left.split()
    groups = [found[0].strip("()").split() for found in re.finditer(r"\([^)]*\)|\S+", right)]
    assert sorted(dims) == sorted(chain.from_iterable(groups)) and len(dims) == rank, (
        f"{text!r} does not relate {rank} dims"
    )
    return Dims(tuple(tuple(dims.index(word) for word in group) for group in groups))


def tensors_of(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Parameters and saved buffers of a model."""
    return (*parameters(model), *buffers(model))


def hf_tensors(rules: Sequence[NameRule], model: ModelConfig) -> tuple[HfTensor, ...]:
    """The rules expanded for every tensor of the model, in the order of moefold's tensors."""
    found: list[HfTensor] = []
    problems: list[Problem] = []
    for spec in tensors_of(model):
        expanded = [hf_tensor for rule in rules for hf_tensor in _expand(rule, spec, model.num_layers)]
        found += expanded
        if not _covers(expanded, spec):
            problems.append(Problem(spec.name, f"shape {spec.shape} is not covered once by {len(expanded)} HF tensors"))
    problems += [
        Problem(name, "two moefold tensors would have this name") for name in _repeated(p.hf_name for p in found)
    ]
    if problems:
        raise ConversionError(*problems)
    return tuple(found)


def hf_copies(rules: Sequence[CopyRule], model: ModelConfig) -> tuple[HfTensor, ...]:
    """HF tensors that repeat others, and the moefold tensors that they repeat."""
    specs = {spec.name: spec for spec in parameters(model)}
    if model.tied_embeddings:
        specs["head.weight"] = specs["embedding.weight"]
    found = []
    for module in range(model.num_mtp):
        for rule in rules:
            spec = specs[rule.moefold_name]
            hf_name = rule.hf_name.format(after=model.num_layers + module)
            found.append(HfTensor(spec.name, (), spec.shape, hf_name, parse_dims("", len(spec.shape))))
    return tuple(found)


def _expand(rule: NameRule, spec: ParameterSpec, layers: int) -> Iterator[HfTensor]:
    numbers = rule.matches(spec.name)
    if numbers is None:
        return
    if "k" in numbers:
        numbers["after"] = str(layers + int(numbers["k"]))
    inner = spec.shape[len(rule.slots) :]
    dims = parse_dims(rule.dims, len(inner))
    for index, more in _indices(rule.slots, spec.shape):
        yield HfTensor(spec.name, index, inner, rule.hf_name.format(**numbers, **more), dims)


def _indices(slots: Sequence[str], shape: Shape) -> Iterator[tuple[tuple[int, ...], dict[str, str]]]:
    """The index of every slice that the slots select, and the values of their placeholders."""
    if not slots:
        yield (), {}
        return
    word = slots[0].strip("{}")
    for index in range(shape[0]) if slots[0].startswith("{") else [int(word)]:
        for rest, names in _indices(slots[1:], shape[1:]):
            yield (index, *rest), {word: str(index), **names}


def _covers(expanded: Sequence[HfTensor], spec: ParameterSpec) -> bool:
    indices = {hf_tensor.index for hf_tensor in expanded}
    inside = all(i < size for index in indices for i, size in zip(index, spec.shape))
    nested = any(index[:n] in indices for index in indices for n in range(len(index)))
    distinct = len(indices) == len(expanded)
    return inside and not nested and distinct and sum(prod(each.shape) for each in expanded) == spec.size


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
