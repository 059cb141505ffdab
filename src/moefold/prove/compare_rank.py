"""One rank of a proof: build its local model, run one step, compare every number with the reference.

Each rank compares its shards. Differences are relative to the largest entry of the whole reference tensor, so a
small entry of a large tensor need not have more correct digits than the others. Some gradients are zero in exact
arithmetic and rounding noise in practice (a router's, when every token has one expert of prob one): they are relative
to a small fraction of the model's largest gradient instead. Muon makes an update of full size of such a gradient too,
which is nothing to compare: those matrices are left out (`noise_of_muon`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from moefold.blueprint.muon_matrices import matrices_of, muon_algorithm
from moefold.blueprint.param_groups import NO_DECAY_KINDS
from moefold.blueprint.parameters import init_std, parameters
from moefold.blueprint.sharding import grid_of
from moefold.comm.process_groups import Groups
from moefold.config.run import RunConfig
from moefold.moe.load_balancing import BalanceLosses
from moefold.moe.routing_policies import PolicyOrName
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of, init_main_weights, local_buffers
from moefold.parallel.param_shards import DATA_GROUPS, TrainedPiece, local_part
from moefold.pipeline.step import StepResult, compute_gradients, count_step_labels, make_optimizer, run_step
from moefold.prove.cases import Case
from moefold.prove.proof_inputs import init_of, labels_of_rank, on_device, rank_batch, rows_in_wave
from moefold.prove.reference import adamw_step
from moefold.prove.routing_replay import replay_routing
from moefold.prove.seen_weights import NarrowWeight, watch_weights
from moefold.prove.unchanged_bits import UNCHANGED, changes, compute_at_once, plain_run

CPU = torch.device("cpu")
_TIMEOUT = timedelta(seconds=240)
# Gradients below this fraction of the model's largest gradient count as zero up to rounding.
_NOISE = 1e-6
# Gradients below this fraction of it are nothing but rounding, in float64; those seen were 1e-18.
_ROUNDING = 1e-14


@dataclass(frozen=True)
class Difference:
    """Of one rank's shard of one quantity; ``is_primary``: this rank is the primary replica of its shard."""

    largest: float
    squares: float
    elements: int
    is_primary: bool


@dataclass(frozen=True)
class ReferenceSize:
    """Largest entry, sum of squares and number of elements of a reference tensor."""

    largest: float
    squares: float
    elements: int


def difference(actual: Tensor, expected: Tensor, is_primary: bool) -> Difference:
    if actual.shape != expected.shape:
        return Difference(float("inf"), float("inf"), actual.numel(), is_primary)
    diff = actual.cpu().double() - expected.double()
    if diff.numel() == 0:
        return Difference(0.0, 0.0, 0, is_primary)
    largest = diff.abs().max().item()
    # A NaN on either side is a failure; comparisons with NaN are false.
    return Difference(
        largest if largest == largest else float("inf"), diff.square().sum().item(), diff.numel(), is_primary
    )


def reference_size(expected: Tensor) -> ReferenceSize:
    wide = expected.double()
    largest = wide.abs().max().item() if wide.numel() else 0.0
    return ReferenceSize(largest, wide.square().sum().item(), wide.numel())


def floors(sizes: dict[str, ReferenceSize]) -> dict[str, float]:
    """By kind of quantity, the size below which a tensor is compared with the model's gradients, not with itself."""
    largest = max((size.largest for name, size in sizes.items() if name.startswith("gradient/")), default=0.0)
    first = _NOISE * largest
    return {"gradient": first, "momentum": first, "exp_avg": 0.1 * first, "exp_avg_sq": 0.05 * first * first}


def relative_error(differences: list[Difference], size: ReferenceSize, floor: float) -> float:
    """The largest difference on any rank, relative to the reference's largest entry."""
    worst = max((item.largest for item in differences), default=float("inf"))
    if worst == 0.0:
        return 0.0
    return worst / max(size.largest, floor, 1e-300)


def relative_norm_error(differences: list[Difference], size: ReferenceSize, floor: float) -> float:
    """The norm of all differences, each element once, relative to the reference's norm."""
    total = sum(item.squares for item in differences if item.is_primary)
    if total == 0.0:
        return 0.0
    return (total / max(size.squares, floor * floor * size.elements, 1e-300)) ** 0.5


def uncovered(differences: list[Difference], size: ReferenceSize) -> int:
    """Elements without a primary replica, or minus those with several; 0 when shards are a partition."""
    return size.elements - sum(item.elements for item in differences if item.is_primary)


# ---- one rank ----


def compare_rank(
    case: Case,
    expected: dict[str, Tensor],
    rank: int,
    routing_policy: PolicyOrName | None = None,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Differences from the reference's quantities, by name, as plain JSON."""
    groups = groups_of(case.run, case.world, rank, _TIMEOUT)
    local_model, optimizer = _start(case.run, groups, device, routing_policy)
    labels = tuple(count_step_labels(count, groups) for count in labels_of_rank(case, rank))
    batches = [on_device(rank_batch(case, wave, rank, labels), device) for wave in range(case.num_waves)]
    if case.run.precision.compute != "float64":
        rows = [rows_in_wave(case, wave, rank) for wave in range(case.num_waves)]
        replay_routing(local_model.model, expected, rows, batches)
    seen: dict[str, Difference] = {}
    narrow = watch_weights(local_model.model, case.run, local_model.narrow_weights)
    # The same tensors are clipped later.
    clipped: dict[str, Tensor] = {}
    before_clipping: dict[str, Tensor] = {}

    def on_gradients(gradients: dict[str, Tensor]) -> None:
        clipped.update(gradients)
        before_clipping.update({name: gradient.detach().clone() for name, gradient in gradients.items()})
        seen.update(_shard_differences(local_model, "gradient", gradients, expected))

    result = run_step(local_model, optimizer, batches, on_gradients)
    seen |= _narrow_differences(local_model, narrow, expected)
    weights = {piece.name: optimizer.main_weight(piece.parameter) for piece in local_model.pieces()}
    seen |= _shard_differences(local_model, "parameter", weights, expected, noise_of_muon(case.run, expected))
    if case.run.precision.master == "remainder":
        seen |= _master_differences(local_model, weights, clipped)
    seen |= _optimizer_differences(local_model, optimizer, expected)
    seen |= _replicated_differences(local_model, result, expected, is_primary=rank == 0)
    if any(name.startswith(f"{UNCHANGED}/") for name in expected):
        plain, optimizer = _start(plain_run(case.run), groups, device, routing_policy)
        compute_at_once(plain.weight_grads)
        changed = changes(before_clipping, compute_gradients(plain, optimizer, batches).gradients)
        seen |= _shard_differences(local_model, UNCHANGED, changed, expected)
    return {name: [item.largest, item.squares, item.elements, item.is_primary] for name, item in seen.items()}


def _start(
    run: RunConfig, groups: Groups, device: torch.device, routing_policy: PolicyOrName | None
) -> tuple[LocalModel, ModelOptimizer]:
    local_model = build_local_model(run, groups, device, init_of(run), routing_policy)
    optimizer = make_optimizer(local_model)
    init_main_weights(local_model, optimizer, init_of(run))
    if local_model.retention is not None:
        # Tensors of a reduced model are smaller than what is worth a copy.
        local_model.retention.offload.least = 1
    return local_model, optimizer


def noise_of_muon(run: RunConfig, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """By name of a parameter, where its entries are of a matrix whose gradient is zero up to rounding.

    Keys of an MTP block over documents of one token: their probs are one, and no gradient comes back. Newton-Schulz
    divides by the norm, so what is left of rounding becomes an update of full size, another one in every layout.
    """
    if run.optim.algorithm != "muon":
        return {}
    gradients = {name: tensor for name, tensor in expected.items() if name.startswith("gradient/")}
    largest = max((reference_size(tensor).largest for tensor in gradients.values()), default=0.0)
    found = {}
    for spec in parameters(run.model):
        gradient = gradients.get(f"gradient/{spec.name}")
        if gradient is None or muon_algorithm(spec.name, spec.kind) != "muon":
            continue
        matrices, noise = matrices_of(spec, run.model), torch.zeros(gradient.shape, dtype=torch.bool)
        for number in range(len(matrices)):
            box = tuple(slice(*span) for span in matrices.spans(number))
            noise[box] = reference_size(gradient[box]).largest <= _ROUNDING * largest
        found[spec.name] = noise
    return found


def _shard_differences(
    local_model: LocalModel,
    what: str,
    tensors: dict[str, Tensor],
    expected: dict[str, Tensor],
    left_out: Mapping[str, Tensor] | None = None,
) -> dict[str, Difference]:
    """Of each parameter-like tensor, against the boxes of the reference tensor that this rank holds.

    ``left_out``: by name, entries that are not compared.
    """
    return {
        f"{what}/{piece.name}": _piece_difference(
            piece, tensors[piece.name], expected[f"{what}/{piece.name}"], (left_out or {}).get(piece.name)
        )
        for piece in local_model.pieces()
        if piece.name in tensors
    }


def _piece_difference(
    piece: TrainedPiece, values: Tensor, expected: Tensor, left_out: Tensor | None = None
) -> Difference:
    parts = list(piece.by_box(values))
    if left_out is not None:
        parts = [(box, torch.where(left_out[box], expected[box].to(part.dtype), part.cpu())) for box, part in parts]
    found = [difference(part, expected[box], piece.is_primary) for box, part in parts]
    return Difference(
        max(item.largest for item in found),
        sum(item.squares for item in found),
        sum(item.elements for item in found),
        piece.is_primary,
    )


def _narrow_differences(
    local_model: LocalModel, narrow: Mapping[str, NarrowWeight], expected: dict[str, Tensor]
) -> dict[str, Difference]:
    """Of narrowed weights, as matmuls had them: this rank's shard under tensor and expert parallelism."""
    found = {}
    for name, weight in narrow.items():
        shard = local_model.param_shards[name]
        replicas = [local_model.groups[group] for group in DATA_GROUPS[grid_of(name)]]
        is_primary = shard.is_primary and all(group.index == 0 for group in replicas)
        box = (slice(None), *shard.unsharded_box)
        for quantity, values in weight.named(name).items():
            found[quantity] = difference(values, expected[quantity][box], is_primary)
    return found


def _optimizer_differences(
    local_model: LocalModel, optimizer: ModelOptimizer, expected: dict[str, Tensor]
) -> dict[str, Difference]:
    """Of all states that checkpoints would hold, but counts of steps."""
    return {
        f"{kind}/{piece.name}": _piece_difference(piece, values, expected[f"{kind}/{piece.name}"])
        for piece in local_model.pieces()
        for kind, values in optimizer.saved_state(piece.parameter).items()
        if kind != "step"
    }


def _master_differences(
    local_model: LocalModel, weights: dict[str, Tensor], clipped: dict[str, Tensor]
) -> dict[str, Difference]:
    """Of main weights that are bfloat16 weights and a remainder: against torch's AdamW in float32 by this rank's own
    gradients. Gradients of two layouts in bfloat16 differ by more than a remainder is worth."""
    run, pieces = local_model.run, [piece for piece in local_model.pieces() if piece.name in clipped]
    mains: dict[str, nn.Parameter] = {}
    for piece in pieces:
        values, std = torch.empty_like(weights[piece.name]), init_std(run.model, piece.name)
        for box, part in piece.by_box(values):
            init_of(run)(piece.kind, run.seed, piece.name, piece.shard.shape, box, std, part)
        mains[piece.name] = nn.Parameter(values)
        mains[piece.name].grad = local_part(clipped[piece.name]).view(values.shape).to(values.dtype)
    decayed = [mains[piece.name] for piece in pieces if piece.kind not in NO_DECAY_KINDS]
    adamw_step(run.optim, decayed, [mains[piece.name] for piece in pieces if piece.kind in NO_DECAY_KINDS])
    return {
        f"master/{piece.name}": difference(weights[piece.name], mains[piece.name].detach(), piece.is_primary)
        for piece in pieces
    }


def _replicated_differences(
    local_model: LocalModel, result: StepResult, expected: dict[str, Tensor], is_primary: bool
) -> dict[str, Difference]:
    """Of the numbers that every rank has in full."""
    sums = result.sums
    values = {
        "loss": sums.loss,
        "mtp_loss": sums.mtp_loss,
        "grad_norm": result.grad_norm,
        "counts": sums.counts_ME,
        "kept": sums.kept_ME,
        "plain": sums.plain_ME,
        "dropped": sums.dropped,
    }
    values |= {f"balance/{name}": sums.balance_M5[:, kind] for kind, name in enumerate(BalanceLosses._fields)}
    seen = {name: difference(value, expected[name], is_primary) for name, value in values.items()}
    state = dict(local_model.model.named_buffers())
    for name in (spec.name for spec in local_buffers(local_model.run, local_model.model)):
        first = local_model.groups["stage"].index == 0
        seen[f"expert_bias/{name}"] = difference(state[name], expected[f"expert_bias/{name}"], first)
    return seen
