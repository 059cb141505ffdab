"""What is left to add up after backward.

Sharded data parallelism has summed every gradient over the ranks that hold other batches. Some parameters are also
repeated on ranks that did *different* work with the *same* batch: norms, router and latent projections see only their
tensor-parallel rank's tokens; a head norm sees only its heads; the bias of a split expert is added on one rank only.
Each such repetition is listed in ``Held.partial``, and one sum per group settles them all. A parameter that several
pipeline ranks hold, a tied embedding for one, is last: its holders add up what each of their stages asked of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moefold.comm.collectives import sum_plain
from moefold.comm.p2p import sum_among
from moefold.comm.process_groups import Group
from moefold.parallel.placements import Held, local_part


@torch.no_grad()
def finish_gradients(model: nn.Module, held: dict[str, Held], pp: Group) -> dict[str, Tensor]:
    """Sum partial gradients; returns this rank's part of every gradient by name."""
    gradients = {name: local_gradient(name, parameter) for name, parameter in model.named_parameters()}
    waiting: dict[str, tuple[Group, list[Tensor]]] = {}
    for name, gradient in gradients.items():
        for group in held[name].partial:
            waiting.setdefault(group.name, (group, []))[1].append(gradient)
    for group, parts in waiting.values():
        _sum_in_place(parts, group)
    for name, gradient in gradients.items():
        if len(held[name].stages) > 1:
            gradient.copy_(sum_among(gradient, held[name].stages, pp))
    return gradients


def local_gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError(f"{name} got no gradient; every parameter takes part in every step, if only with zeros")
    return local_part(parameter.grad)


def _sum_in_place(parts: list[Tensor], group: Group) -> None:
    """One message for many small tensors."""
    if group.alone:
        return
    total = sum_plain(torch.cat([part.flatten() for part in parts]), group)
    for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))
