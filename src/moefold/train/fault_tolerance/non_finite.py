"""Which tensor is not finite, on which rank, and in which layer it began: asked only when a step is skipped.

The grad norm and the losses show that a step is bad, before the optimizer sees it (`state.skip_reason`). This says
where, in two looks that all ranks take together:

- Gradients. A gradient that is not finite is passed on to all layers below, and parameters above are clean. So of the
  poisoned parameters, in the order of the forward pass, the last ones belong to the layer where backward met it first.
  Gradients are sums over data-parallel ranks: the rank that holds the poisoned shard need not be the one that made it.
- The forward pass, run again without gradients on each rank's own tokens. The first part of the model whose output is
  not finite is named with its ranks. If all is finite this time, the values were a fault of that one computation
  (overflow in backward, or a transient error), and not one of data or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moefold.blueprint.parameters import parameters
from moefold.comm.collectives import all_gather_no_grad, device_of
from moefold.comm.process_groups import Group
from moefold.errors import name_ranks
from moefold.nn.batch import Batch
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import local_part
from moefold.pipeline.runtime import run_forward_only


def where_not_finite(local_model: LocalModel, batches: Sequence[Batch] | None) -> str:
    """A phrase that names gradients and layers, the same on all ranks; all of them must call it.

    ``batches`` are this rank's microbatches; None leaves the forward pass out.
    """
    gradients = poisoned_gradients(local_model)
    return gradients if batches is None else f"{gradients}; {poisoned_forward(local_model, batches)}"


@torch.no_grad()
def poisoned_gradients(local_model: LocalModel) -> str:
    names = [spec.name for spec in parameters(local_model.run.model)]
    world, number_of = local_model.groups["world"], {name: number for number, name in enumerate(names)}
    flags = torch.zeros(1, len(names), dtype=torch.int64)
    largest = torch.zeros(1, len(names), dtype=torch.float64)
    for piece in local_model.pieces():
        gradient = piece.parameter.grad
        if gradient is not None and local_part(gradient).numel():
            flags[0, number_of[piece.name]] = int((~torch.isfinite(local_part(gradient))).sum())
            largest[0, number_of[piece.name]] = float(local_part(gradient).abs().max())
    by_rank = _everyones(flags, world)
    poisoned = [number for number in range(len(names)) if any(row[number] for row in by_rank)]
    if not poisoned:
        # The sum of squares may overflow all the same.
        largest_of = _everyones(largest, world)
        value, number = max((value, at) for row in largest_of for at, value in enumerate(row))
        ranks = [rank for rank, row in enumerate(largest_of) if row[number] == value]
        return f"all gradients are finite, the largest is {value:.3g} in {names[number]} on {name_ranks(ranks)}"
    last = poisoned[-1]
    ranks = [rank for rank, row in enumerate(by_rank) if row[last]]
    elements = sum(row[last] for row in by_rank)
    more = f", as are {len(poisoned) - 1} parameters before it" if len(poisoned) > 1 else ""
    return f"the gradient of {names[last]} is not finite ({elements:,} elements on {name_ranks(ranks)}){more}"


def poisoned_forward(local_model: LocalModel, batches: Sequence[Batch]) -> str:
    """The first part whose output is not finite when the same tokens are run again."""
    model, world = local_model.model, local_model.groups["world"]
    parts = parts_in_order(model)
    bad: set[str] = set()
    training = model.training
    model.eval()
    try:
        local_model.sharding.start_evaluation()
        with _watching(parts, bad.add):
            loss = run_forward_only(local_model, batches).loss
        local_model.sharding.end_evaluation()
    finally:
        model.train(training)
        if local_model.maxima is not None:
            # Of this forward pass, which must not count for the next step's clipping.
            local_model.maxima.take()
    order = all_parts(local_model)
    flags = torch.tensor([[int(name in bad) for name in order] + [int(not torch.isfinite(loss).all())]])
    by_rank = _everyones(flags, world)
    for number, name in enumerate([*order, "the loss"]):
        if ranks := [rank for rank, row in enumerate(by_rank) if row[number]]:
            return f"in the forward pass run again, {name} is the first that is not finite, on {name_ranks(ranks)}"
    return "the forward pass run again is finite everywhere"


def parts_in_order(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of this rank whose outputs are looked at."""
    names = ("embedding", "final_norm")
    found = {name: module for name, module in model.named_children() if name in names and module is not None}
    for folder in ("layers", "mtp"):
        found |= {f"{folder}.{number}": module for number, module in getattr(model, folder).items()}
    return found


def all_parts(local_model: LocalModel) -> list[str]:
    """Of the whole model, in the order of the forward pass; a rank of a pipeline has some of them."""
    model = local_model.run.model
    layers = [f"layers.{number}" for number in range(model.num_layers)]
    return ["embedding", *layers, "final_norm", *(f"mtp.{depth}" for depth in range(model.num_mtp))]


@contextmanager
def _watching(parts: dict[str, nn.Module], tell: Callable[[str], None]) -> Iterator[None]:
    def look(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if any(not bool(torch.isfinite(tensor).all()) for tensor in _floats(output)):
                tell(name)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in parts.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floats(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _floats(each)


def _everyones(row: Tensor, world: Group) -> list[list[float]]:
    device = torch.device("cpu") if world.alone else device_of(world)
    gathered: list[list[float]] = all_gather_no_grad(row.to(device), (1,) * world.size, world).tolist()
    return gathered
