"""Narrowed weights: what the matmuls of a rank had, and what the whole weights narrow to.

Under sharded data parallelism a weight is whole only while its module computes, so what it was narrowed to is noted
then, at every forward; the last of the step remains. Scales are noted too, spread over the values that they belong to:
power-of-two scales of other blocks often give the same values, and would hide that blocks are others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.blueprint.narrow_matmuls import matmuls
from moefold.config.casts import Cast
from moefold.config.precision_recipes import LinearCasts
from moefold.config.run import RunConfig
from moefold.precision.amax import OWN_AMAXES, Amaxes
from moefold.precision.operands import NarrowWeights, Quantizers
from moefold.precision.quantize import Quantized, dequantize, fake_quantize, quantize


class NarrowWeight(NamedTuple):
    """[2, ...] each, in the shape of the weight: of fprop's cast and of dgrad's. A cast without scales has none."""

    values: Tensor
    scales: Tensor | None

    def named(self, name: str) -> dict[str, Tensor]:
        """As quantities of the proof."""
        found = {f"codes/{name}": self.values}
        return found if self.scales is None else found | {f"scales/{name}": self.scales}


def whole_weights(run: RunConfig, named: dict[str, Tensor]) -> dict[str, NarrowWeight]:
    """By name, from the whole weights: the reference's."""
    return {
        name: NarrowWeight(
            torch.stack([_turned(fake_quantize(_turned(named[name], turned), cast), turned) for cast, turned in both]),
            None
            if any(cast.element == "bf16" for cast, _ in both)
            else torch.stack([_scales(quantize(_turned(named[name], turned), cast), turned) for cast, turned in both]),
        )
        for name, both in _narrow_casts(run).items()
    }


def watch_weights(model: nn.Module, run: RunConfig, weights: NarrowWeights | None) -> dict[str, NarrowWeight]:
    """The same from a rank's shards, filled in while its modules run. ``weights``: what narrows them."""
    seen: dict[str, NarrowWeight] = {}
    if weights is None:
        return seen
    narrow: Callable[..., Tensor] = weights.narrow
    casts_by_name = _narrow_casts(run)
    # By weight and whether it was turned; the weight is kept, so that its id stays its own.
    scales: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def noted(
        weight: Tensor, cast: Cast | None, transposed: bool, quantizers: Quantizers, amaxes: Amaxes = OWN_AMAXES
    ) -> Tensor:
        def note_scales(matrices: Tensor, *of_cast: object, **more: object) -> Quantized:
            quantized = quantizers.quantize(matrices, *of_cast, **more)
            # A square block serves both directions, and is not turned.
            turned = transposed and cast is not None and not cast.is_square
            scales[id(weight), transposed] = weight, _scales(quantized, turned)
            return quantized

        if (gathered := weights.codes_of(weight)) is not None:
            # Ranks have narrowed it in shards; one copy serves both directions.
            scales[id(weight), False] = weight, _scales(gathered, False)
        return narrow(weight, cast, transposed, quantizers._replace(quantize=note_scales), amaxes)

    def note(
        weight: Tensor, cast: Cast | None, transposed: bool, quantizers: Quantizers, amaxes: Amaxes = OWN_AMAXES
    ) -> Tensor:
        if not transposed:
            # In forward; FSDP has put the whole weight in its place.
            (name,) = (name for name, parameter in model.named_parameters() if parameter is weight)
            both = [noted(weight, cast, turned, quantizers, amaxes) for cast, turned in casts_by_name[name]]
            # One that serves both directions was narrowed once.
            of_weight = [scales.get((id(weight), turned), scales.get((id(weight), False))) for turned in (False, True)]
            found = [item[1] for item in of_weight if item is not None]
            seen[name] = NarrowWeight(torch.stack(both).detach().clone(), torch.stack(found) if found else None)
        return noted(weight, cast, transposed, quantizers, amaxes)

    weights.narrow = note  # type: ignore[method-assign]
    return seen


def _narrow_casts(run: RunConfig) -> dict[str, tuple[tuple[Cast, bool], ...]]:
    """By name of a narrowed weight, the casts of fprop and of dgrad, and whether they are of its transpose."""
    return {weight.name: _both(casts) for weight, casts in matmuls(run) if casts is not None}


def _both(casts: LinearCasts) -> tuple[tuple[Cast, bool], ...]:
    assert casts.w_fprop is not None and casts.w_dgrad is not None
    return (casts.w_fprop, False), (casts.w_dgrad, True)


def _turned(matrices: Tensor, turned: bool) -> Tensor:
    return matrices.transpose(-2, -1) if turned else matrices


def _scales(quantized: Quantized, turned: bool) -> Tensor:
    """What each value's code is multiplied by, in the shape of the weight: the values of codes of one."""
    codes = quantized.codes_MK
    # The E2M1 code of 1.0 is 2.
    ones = torch.full_like(codes, 2) if codes.dtype == torch.uint8 else torch.ones(codes.shape).to(codes.dtype)
    return _turned(dequantize(replace(quantized, codes_MK=ones)), turned)
