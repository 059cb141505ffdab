"""Which of our tensors is which of theirs, as data that is read in both directions.

A rule names a tensor of ours, a tensor of theirs, and how their dims relate:

    NameRule("head.weight", "lm_head.weight")                                       the same tensor
    NameRule("ffn.gate_up[1]", "ffn.up_proj.weight")                                theirs is one slice of ours
    NameRule("experts.down[{e}]", "experts.{e}.down_proj.weight")                   one slice for each e
    NameRule("experts.gate_up", "experts.gate_up_proj", "e 2 f d = e d (f 2)")      other order, dims merged
    NameRule("mtp.{k}.join.weight", "layers.{after}.eh_proj.weight")                {after} counts on after the layers

Every step only moves elements, so the way back is not written anywhere: it is the same line read from right to left.
A family of models is a list of rules. Spelled out for a model's sizes, they must cover each of our tensors exactly once
and use no name of theirs twice; `pieces` proves that before anything is read or written. Where their files hold a
tensor several times, a `CopyRule` says which of ours the others repeat.
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
    """`ours` may end in the indices of a slice; braces in names stand for numbers, the same ones on both sides."""

    ours: str
    theirs: str
    dims: str = ""

    @property
    def name(self) -> str:
        return self.ours.partition("[")[0]

    @property
    def slots(self) -> tuple[str, ...]:
        inner = self.ours.partition("[")[2].rstrip("]")
        return tuple(word.strip() for word in inner.split(",")) if inner else ()

    def matches(self, name: str) -> dict[str, str] | None:
        found = self._pattern.fullmatch(name)
        return None if found is None else found.groupdict()

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", re.escape(self.name)))


@dataclass(frozen=True)
class CopyRule:
    """A tensor of theirs that repeats one of ours, once for each module that looks ahead."""

    ours: str
    theirs: str


@dataclass(frozen=True)
class Piece:
    """One tensor of theirs and the slice of ours that it is."""

    ours: str
    at: tuple[int, ...]
    our_shape: Shape
    theirs: str
    dims: Dims
    # Leading indices into theirs: a piece cut out of a larger one.
    their_at: tuple[int, ...] = ()

    @property
    def their_shape(self) -> Shape:
        return self.dims.their_shape(self.our_shape)

    @property
    def box(self) -> Box:
        """Where the slice lies in our whole tensor."""
        return (*(slice(i, i + 1) for i in self.at), *(slice(0, size) for size in self.our_shape))

    def to_theirs(self, ours: Tensor) -> Tensor:
        """``ours`` has the size of ``box``."""
        return self.dims.to_theirs(ours.reshape(self.our_shape))

    def to_ours(self, theirs: Tensor) -> Tensor:
        return self.dims.to_ours(theirs, self.our_shape)

    def split(self) -> Iterator[Piece]:
        """The same, expert by expert where both sides stack them first: what must be in memory at a time is smaller."""
        if len(self.our_shape) < 3 or self.dims.groups[0] != (0,):
            yield self
            return
        inner = Dims(tuple(tuple(dim - 1 for dim in group) for group in self.dims.groups[1:]))
        for row in range(self.our_shape[0]):
            at, their_at = (*self.at, row), (*self.their_at, row)
            yield Piece(self.ours, at, self.our_shape[1:], self.theirs, inner, their_at)


@dataclass(frozen=True)
class Dims:
    """Their dims as groups of ours: `groups[k]` are the dims of ours that were merged into their dim k, in order."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(dim for group in self.groups for dim in group)

    def their_shape(self, our_shape: Shape) -> Shape:
        return tuple(prod(our_shape[dim] for dim in group) for group in self.groups)

    def to_theirs(self, ours: Tensor) -> Tensor:
        return ours.permute(self.order).reshape(self.their_shape(tuple(ours.shape)))

    def to_ours(self, theirs: Tensor, our_shape: Shape) -> Tensor:
        apart = theirs.reshape([our_shape[dim] for dim in self.order])
        return apart.permute([self.order.index(dim) for dim in range(len(our_shape))])


def parse_dims(text: str, rank: int) -> Dims:
    """`"e 2 f d = e d (f 2)"`; no text means the same dims in the same order."""
    if not text:
        return Dims(tuple((dim,) for dim in range(rank)))
    left, right = (side.strip() for side in text.split("="))
    ours = left.split()
    groups = [found[0].strip("()").split() for found in re.finditer(r"\([^)]*\)|\S+", right)]
    assert sorted(ours) == sorted(chain.from_iterable(groups)) and len(ours) == rank, (
        f"{text!r} does not relate {rank} dims"
    )
    return Dims(tuple(tuple(ours.index(word) for word in group) for group in groups))


def tensors_of(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All that a model's weights are: what is trained, and the buffers that are saved with it."""
    return (*parameters(model), *buffers(model))


def pieces(rules: Sequence[NameRule], model: ModelConfig) -> tuple[Piece, ...]:
    """The rules spelled out for every tensor of the model; one of ours after the other."""
    found: list[Piece] = []
    problems: list[Problem] = []
    for spec in tensors_of(model):
        mine = [piece for rule in rules for piece in _spelled_out(rule, spec, model.num_layers)]
        found += mine
        if not _covers(mine, spec):
            problems.append(
                Problem(spec.name, f"shape {spec.shape} is not covered once by {len(mine)} of their tensors")
            )
    problems += [
        Problem(name, "two of our tensors would have this name") for name in _repeated(p.theirs for p in found)
    ]
    if problems:
        raise ConversionError(*problems)
    return tuple(found)


def copies(rules: Sequence[CopyRule], model: ModelConfig) -> tuple[Piece, ...]:
    """What their files hold beside the pieces, and where it is in ours."""
    specs = {spec.name: spec for spec in parameters(model)}
    if model.tied_embeddings:
        specs["head.weight"] = specs["embedding.weight"]
    found = []
    for module in range(model.num_mtp):
        for rule in rules:
            spec = specs[rule.ours]
            theirs = rule.theirs.format(after=model.num_layers + module)
            found.append(Piece(spec.name, (), spec.shape, theirs, parse_dims("", len(spec.shape))))
    return tuple(found)


def _spelled_out(rule: NameRule, spec: ParameterSpec, layers: int) -> Iterator[Piece]:
    numbers = rule.matches(spec.name)
    if numbers is None:
        return
    if "k" in numbers:
        numbers["after"] = str(layers + int(numbers["k"]))
    inner = spec.shape[len(rule.slots) :]
    dims = parse_dims(rule.dims, len(inner))
    for at, more in _indices(rule.slots, spec.shape):
        yield Piece(spec.name, at, inner, rule.theirs.format(**numbers, **more), dims)


def _indices(slots: Sequence[str], shape: Shape) -> Iterator[tuple[tuple[int, ...], dict[str, str]]]:
    """Every slice that the slots speak of, and what their words stand for in it."""
    if not slots:
        yield (), {}
        return
    word = slots[0].strip("{}")
    for index in range(shape[0]) if slots[0].startswith("{") else [int(word)]:
        for rest, names in _indices(slots[1:], shape[1:]):
            yield (index, *rest), {word: str(index), **names}


def _covers(mine: Sequence[Piece], spec: ParameterSpec) -> bool:
    places = {piece.at for piece in mine}
    inside = all(i < size for at in places for i, size in zip(at, spec.shape))
    nested = any(at[:n] in places for at in places for n in range(len(at)))
    return inside and not nested and len(places) == len(mine) and sum(prod(p.our_shape) for p in mine) == spec.size


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
