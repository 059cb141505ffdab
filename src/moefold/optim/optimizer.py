"""The update: the global norm of all gradients, clipping by it, and one optimizer over all that a rank updates.

Each rank sums the squares of the shards for which it is the primary replica; every shard has exactly one. One
all-reduce over all ranks then counts every element of the model once, across grids, stages and shards.

`build_optimizer` gives every piece its rule (`blueprint.param_groups`: algorithm, lr, weight decay), and makes one
optimizer per algorithm from the table ``ALGORITHMS``. `ModelOptimizer` is all of them as one. AdamW with states as
torch has them is torch's, in the implementation that ``optim.implementation`` names: the fused update reads and writes
parameter, gradient and moments once; foreach makes about a dozen passes, and holds temporary copies of all parameters
of a group. Any other format or place of states is `ChunkedAdamW`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from moefold.blueprint.param_groups import UpdateRule, update_rule
from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.process_groups import Group, Groups
from moefold.config.optim import OptimConfig
from moefold.config.run import RunConfig
from moefold.optim.chunked_adamw import ChunkedAdamW, StateFormat, saved_kinds
from moefold.optim.muon import Muon
from moefold.optim.state_staging import Staging
from moefold.optim.trained_pieces import Piece, SavedKind, SavingOptimizer, local_of
from moefold.plan.stage_contents import muon_parameters
from moefold.precision.dtypes import TORCH_FORMATS

# Squares are summed in float32 (or float64) over spans of this many entries, and the spans in float64.
_SPAN = 4096


@torch.no_grad()
def grad_norm_of(primary_shards: Iterable[Tensor], world: Group, device: torch.device) -> Tensor:
    """The norm of the whole model's gradient, from the shards for which this rank is the primary replica.

    A rank may be primary for none; its zero is on the device all the same, where the others' all-reduce is.
    """
    shards = list(primary_shards)
    squares = sums_of_squares(shards) if device.type == "cuda" else [sum_of_squares(shard) for shard in shards]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    return all_reduce_no_grad(total, world).sqrt()


def sums_of_squares(shards: Sequence[Tensor]) -> list[Tensor]:
    """``sum_of_squares`` of each, for GPUs: a few launches for all of them instead of eight for each.

    The foreach kernel reads the gradient as it is and sums in float64. On a CPU it would loop over tensors, and make a
    float64 copy of each.
    """
    if not shards:
        return []
    norms = torch._foreach_norm([shard.reshape(-1) for shard in shards], 2, torch.float64)
    return list(torch._foreach_mul(norms, norms))


def sum_of_squares(shard: Tensor) -> Tensor:
    """In float64, in one pass without a float64 copy of the gradient."""
    flat = shard.reshape(-1)
    even = flat.numel() // _SPAN * _SPAN
    spans, rest = flat[:even].view(-1, _SPAN), flat[even:].double()
    acc_dtype = torch.promote_types(shard.dtype, torch.float32)
    norms = torch.linalg.vector_norm(spans, dim=1, dtype=acc_dtype).double()
    return norms.square().sum() + rest.square().sum()


@torch.no_grad()
def clip_gradients(gradients: Iterable[Tensor], norm: Tensor, bound: float) -> None:
    """Scale in place so that the norm is at most ``bound``; every rank computes the same factor."""
    factor = (bound / norm).clamp(max=1.0)
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        of_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, members in of_dtype.items():
        torch._foreach_mul_(members, factor.to(dtype))


# ---- the optimizer ----


@dataclass(frozen=True)
class OptimizerInputs:
    """What an algorithm may read: the run, where its parameters are, and the groups of ranks, if there are any."""

    run: RunConfig
    device: torch.device
    groups: Groups | None = None


PiecesByRule = Mapping[UpdateRule, Sequence[Piece]]
MakePart = Callable[[PiecesByRule, OptimizerInputs], SavingOptimizer]


class ModelOptimizer(SavingOptimizer):
    """One optimizer of several parts. Groups and states are the parts' own objects."""

    def __init__(self, parts: Sequence[SavingOptimizer], run: RunConfig) -> None:
        groups = [group for part in parts for group in part.param_groups]
        # A pipeline rank with empty stages has no parameters; torch needs at least one group.
        super().__init__(groups or [{"params": [], "lr_scale": 1.0}], {"lr": run.optim.lr})
        self.parts, self.run = tuple(parts), run
        self._part_of: dict[Tensor, SavingOptimizer] = {
            parameter: part for part in parts for group in part.param_groups for parameter in group["params"]
        }
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def set_lr(self, lr: float) -> None:
        """The lr of the schedule, which every group scales."""
        for group in self.param_groups:
            group["lr"] = lr * group["lr_scale"]

    def saved_kinds(self, parameter: nn.Parameter) -> dict[str, SavedKind]:
        return self._part_of[parameter].saved_kinds(parameter)

    def saved_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return self._part_of[parameter].saved_state(parameter)

    def load_saved(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> None:
        self._part_of[parameter].load_saved(parameter, saved)

    def stored_state(self, parameter: nn.Parameter) -> dict[str, Tensor | int]:
        return self._part_of[parameter].stored_state(parameter)

    def on_host(self, parameter: Tensor) -> bool:
        return self._part_of[parameter].on_host(parameter)

    def main_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self._part_of[parameter].main_dtype(parameter)

    def main_weight(self, parameter: nn.Parameter) -> Tensor:
        return self._part_of[parameter].main_weight(parameter)

    def set_main_weight(self, parameter: nn.Parameter, values: Tensor) -> None:
        self._part_of[parameter].set_main_weight(parameter, values)

    def forget(self, parameter: nn.Parameter) -> None:
        self._part_of[parameter].forget(parameter)

    def kinds_of(self, name: str, kind: str) -> dict[str, SavedKind]:
        """`saved_kinds` of any parameter of the model, by its name and kind in the blueprint."""
        return SAVED_KINDS[update_rule(name, kind, self.run.optim).algorithm](self.run)


def build_optimizer(pieces: Iterable[Piece], inputs: OptimizerInputs) -> ModelOptimizer:
    # A rank without a piece of any matrix still meets the others in Muon's exchanges.
    by_algorithm: dict[str, dict[UpdateRule, list[Piece]]] = {name: {} for name in algorithms_of(inputs.run.optim)}
    for piece in pieces:
        rule = update_rule(piece.name, piece.kind, inputs.run.optim)
        by_algorithm.setdefault(rule.algorithm, {}).setdefault(rule, []).append(piece)
    parts = [ALGORITHMS[name](by_rule, inputs) for name, by_rule in by_algorithm.items()]
    return ModelOptimizer(parts, inputs.run)


def algorithms_of(config: OptimConfig) -> set[str]:
    """Those that this stage's ranks must all have."""
    return {"muon"} & {config.algorithm, *(group.algorithm for group in config.groups)}


def state_format(run: RunConfig) -> StateFormat | None:
    """How AdamW stores its states; None where torch's own AdamW does it."""
    precision, on = run.precision, run.memory.optimizer
    moments, remainder = precision.moments or precision.params, precision.master == "remainder"
    stochastic = precision.moments_rounding == "stochastic" and moments in ("bfloat16", "float8")
    if moments == precision.params and on == "device" and not stochastic and not remainder:
        return None
    return StateFormat(moments, stochastic, remainder, on)


def adamw(by_rule: PiecesByRule, inputs: OptimizerInputs) -> SavingOptimizer:
    config, format = inputs.run.optim, state_format(inputs.run)
    pieces = [piece for members in by_rule.values() for piece in members]
    betas = (config.beta1, config.beta2)
    if format is not None:
        return ChunkedAdamW(
            [param_group(rule, members) for rule, members in by_rule.items()],
            pieces,
            format,
            lr=config.lr,
            betas=betas,
            eps=config.eps,
            fused=config.implementation == "fused",
            seed=inputs.run.seed,
            device=inputs.device,
        )
    # DTensors and plain tensors are in separate groups, because one fused update cannot mix the two.
    groups: dict[tuple[UpdateRule, bool], list[Piece]] = {}
    for rule, members in by_rule.items():
        for piece in members:
            groups.setdefault((rule, isinstance(piece.parameter, DTensor)), []).append(piece)
    return TorchAdamW(
        [param_group(rule, members) for (rule, _), members in groups.items()],
        lr=config.lr,
        betas=betas,
        eps=config.eps,
        foreach=config.implementation == "foreach",
        fused=config.implementation == "fused",
    )


def param_group(rule: UpdateRule, pieces: Iterable[Piece]) -> dict[str, object]:
    """As torch has them."""
    parameters = [piece.parameter for piece in pieces]
    return {"params": parameters, "weight_decay": rule.weight_decay, "lr_scale": rule.lr_scale}


def muon(by_rule: PiecesByRule, inputs: OptimizerInputs) -> SavingOptimizer:
    run, groups = inputs.run, inputs.groups
    assert groups is not None, "Muon deals matrices to the ranks of its stage"
    layouts = muon_parameters(run, groups.layout, groups.rank)
    return Muon(
        [param_group(rule, members) for rule, members in by_rule.items()],
        [piece for members in by_rule.values() for piece in members],
        layouts,
        groups["stage"],
        run.optim.muon,
        run.optim.lr,
        Staging(run.memory.optimizer, inputs.device),
        torch.promote_types(TORCH_FORMATS[run.precision.params], torch.float32),
    )


class FrozenWeights(SavingOptimizer):
    """Parameters that are saved and loaded with the others, without an update and without states."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Nothing changes."""

    def saved_kinds(self, parameter: nn.Parameter) -> dict[str, SavedKind]:
        return {}

    def saved_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {}

    def load_saved(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> None:
        """There is nothing to load."""


def frozen(by_rule: PiecesByRule, inputs: OptimizerInputs) -> SavingOptimizer:
    return FrozenWeights([param_group(rule, members) for rule, members in by_rule.items()], {})


# By the names of `optim.algorithm`, and what is not updated (`UpdateRule.algorithm`).
ALGORITHMS: dict[str, MakePart] = {"adamw": adamw, "muon": muon, "frozen": frozen}


def adamw_kinds(run: RunConfig) -> dict[str, SavedKind]:
    return saved_kinds(state_format(run) or StateFormat(run.precision.moments or run.precision.params))


def muon_kinds(run: RunConfig) -> dict[str, SavedKind]:
    return {"momentum": SavedKind(TORCH_FORMATS[run.precision.params], single=False)}


# What checkpoints hold of each algorithm's states.
SAVED_KINDS: dict[str, Callable[[RunConfig], dict[str, SavedKind]]] = {
    "adamw": adamw_kinds,
    "muon": muon_kinds,
    "frozen": lambda run: {},
}


class TorchAdamW(optim.AdamW, SavingOptimizer):
    """torch's AdamW, with states for checkpoints.

    The update is of every number by itself, so it is made on local shards: torch would infer for the list of all
    parameters how its result is sharded, which takes a quarter of a restart's time in the first step.
    """

    def _init_group(self, group: dict[str, object], *lists: list[Tensor]) -> bool:
        """Fills the lists of parameters, gradients and states that the update reads and writes."""
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_of, tensors)
        return has_complex

    def saved_kinds(self, parameter: nn.Parameter) -> dict[str, SavedKind]:
        moment = SavedKind(parameter.dtype, single=False)
        return {"step": SavedKind(torch.float32, single=True), "exp_avg": moment, "exp_avg_sq": moment}

    def saved_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A parameter that never had a gradient has no state; its first step would start from zeros."""
        state: dict[str, Tensor] = self.state.get(parameter) or {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter.detach()),
            "exp_avg_sq": torch.zeros_like(parameter.detach()),
        }
        return {kind: local_of(value) for kind, value in state.items()}

    @torch.no_grad()
    def load_saved(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> None:
        """A fused update reads step counts on the parameter's device; the others read them on the host."""
        counts = parameter.device if self.defaults["fused"] else torch.device("cpu")
        state = {"step": saved["step"].to(counts, copy=True)}
        for kind in ("exp_avg", "exp_avg_sq"):
            state[kind] = torch.zeros_like(parameter.detach())
            local_of(state[kind]).copy_(saved[kind])
        self.state[parameter] = state
