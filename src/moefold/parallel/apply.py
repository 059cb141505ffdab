"""From a run and this rank's groups to this rank's share of the model, in one fixed order.

1. Build the whole model on the meta device, with seams that reach this rank's groups: no memory yet.
2. Cut every parameter to this rank's tensor- and expert-parallel part, as the blueprint says.
3. Shard over data parallelism, still without memory.
4. Give the remaining parts memory and first values, which depend on their global place only.

So no rank ever holds more than its own part, and the order in which things happen is this function, not a convention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.blueprint.parameters import buffers, parameters
from moefold.comm.mesh import Groups
from moefold.config.run import RunConfig
from moefold.model.build import Seams, build_decoder
from moefold.model.decoder import Decoder
from moefold.model.initialize import Box, first_values
from moefold.parallel.data import shard_over_data
from moefold.parallel.expert import dispatcher_for, microbatch_tokens
from moefold.parallel.placements import Held, cut_parameters, held_parameters, local_part
from moefold.parallel.tensor import TokenShards, VocabShards
from moefold.precision.formats import TORCH_FORMATS
from moefold.precision.weights import hold_in

FirstValues = Callable[[str, int, str, tuple[int, ...], Box, float, Tensor], None]


@dataclass(frozen=True)
class Share:
    """One rank's part of a run's model."""

    run: RunConfig
    groups: Groups
    model: Decoder
    held: dict[str, Held]


def take_share(run: RunConfig, groups: Groups, device: torch.device, start: FirstValues = first_values) -> Share:
    """Build this rank's share; ``start`` decides the first values."""
    held = held_parameters(run.model, groups)
    with torch.device("meta"):
        model = build_decoder(
            run.model, TORCH_FORMATS[run.precision.compute], run.precision.experts, seams_of(run, groups)
        )
    hold_in(model, TORCH_FORMATS[run.precision.params])
    cut_parameters(model, held)
    shard_over_data(model, groups, device.type)
    model.to_empty(device=device)
    fill(run, model, held, start)
    return Share(run, groups, model, held)


def seams_of(run: RunConfig, groups: Groups) -> Seams:
    return Seams(
        tokens=TokenShards(groups, microbatch_tokens(run)),
        vocab=VocabShards(groups["tp"]),
        dispatcher=lambda _: dispatcher_for(run, groups),
        # The bias of a split expert is added on one of the ranks that hold its parts.
        bias_share=float(groups["etp"].index == 0),
    )


@torch.no_grad()
def fill(run: RunConfig, model: Decoder, held: dict[str, Held], start: FirstValues) -> None:
    """Write first values into every parameter's part and every buffer."""
    tensors = dict(model.named_parameters())
    for spec in parameters(run.model):
        part = local_part(tensors[spec.name])
        values = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        start(spec.kind, run.seed, spec.name, spec.shape, held[spec.name].box, run.model.init_std, values)
        part.copy_(values)
    state = dict(model.named_buffers())
    for spec in buffers(run.model):
        whole = tuple(slice(0, size) for size in spec.shape)
        start(spec.kind, run.seed, spec.name, spec.shape, whole, run.model.init_std, state[spec.name])
