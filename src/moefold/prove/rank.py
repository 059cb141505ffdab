"""What one rank of a proof does: take its share, run one step, hold every number against the reference."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer

from moefold.blueprint.parameters import parameters
from moefold.moe.routing_policies import PolicyOrName
from moefold.optim.adamw import adamw
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of, local_buffers
from moefold.parallel.param_shards import local_part
from moefold.pipeline.step import StepResult, count_step_labels, run_step
from moefold.prove.cases import Case
from moefold.prove.error_norms import Difference, difference
from moefold.prove.init_values import busy_values
from moefold.prove.proof_batches import labels_of_rank, rank_batch
from moefold.prove.routing_replay import replay_choices

_PATIENCE = timedelta(seconds=60)


def compare_rank(case: Case, reference: Path, rank: int, routing_policy: PolicyOrName | None = None) -> dict[str, Any]:
    """Differences by quantity, as plain JSON."""
    expected = load_file(reference)
    groups = groups_of(case.run, case.world, rank, _PATIENCE)
    local_model = build_local_model(case.run, groups, torch.device("cpu"), busy_values, routing_policy)
    kinds = {spec.name: spec.kind for spec in parameters(case.run.model)}
    optimizer = adamw(
        ((parameter, kinds[name]) for name, parameter in local_model.model.named_parameters()), case.run.optim
    )
    labels = tuple(count_step_labels(mine, groups) for mine in labels_of_rank(case, rank))
    batches = [rank_batch(case, wave, rank, labels) for wave in range(case.num_waves)]
    if case.run.precision.compute == "bfloat16":
        replay_choices(local_model.model, expected, groups["dp"].index, batches)
    seen: dict[str, Difference] = {}

    def look(gradients: dict[str, Tensor]) -> None:
        seen.update(_parts(local_model, "gradient", gradients, expected))

    result = run_step(local_model, optimizer, batches, look)
    seen |= _parts(local_model, "parameter", dict(local_model.model.named_parameters()), expected)
    seen |= _states(local_model, optimizer, expected)
    seen |= _whole(local_model, result, expected, is_primary=rank == 0)
    return {name: [item.largest, item.squares, item.elements, item.is_primary] for name, item in seen.items()}


def _parts(
    local_model: LocalModel, what: str, tensors: dict[str, Tensor], expected: dict[str, Tensor]
) -> dict[str, Difference]:
    """Compare each parameter-like tensor with the box of the reference that this rank holds."""
    return {
        f"{what}/{name}": difference(
            local_part(tensor.detach()),
            expected[f"{what}/{name}"][local_model.param_shards[name].box],
            local_model.param_shards[name].is_primary,
        )
        for name, tensor in tensors.items()
    }


def _states(local_model: LocalModel, optimizer: Optimizer, expected: dict[str, Tensor]) -> dict[str, Difference]:
    seen: dict[str, Difference] = {}
    for what in ("exp_avg", "exp_avg_sq"):
        states = {name: optimizer.state[parameter][what] for name, parameter in local_model.model.named_parameters()}
        seen |= _parts(local_model, what, states, expected)
    return seen


def _whole(
    local_model: LocalModel, result: StepResult, expected: dict[str, Tensor], is_primary: bool
) -> dict[str, Difference]:
    """Numbers that every rank must hold in full."""
    sums = result.sums
    mine = {
        "loss": sums.loss,
        "ahead": sums.mtp_loss,
        "grad_norm": result.grad_norm,
        "counts": sums.counts_ME,
        "kept": sums.kept_ME,
        "plain": sums.plain_ME,
        "dropped": sums.dropped,
    }
    mine |= {f"balance/{name}": value for name, value in sums.balance._asdict().items()}
    seen = {name: difference(value, expected[name], is_primary) for name, value in mine.items()}
    state = dict(local_model.model.named_buffers())
    for name in (spec.name for spec in local_buffers(local_model.run, local_model.model)):
        first = local_model.groups["stage"].index == 0
        seen[f"expert_bias/{name}"] = difference(state[name], expected[f"expert_bias/{name}"], first)
    return seen
