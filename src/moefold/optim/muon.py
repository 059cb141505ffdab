"""Muon over sharded parameters.

For a matrix W of A x B with gradient G, in the notation of Moonlight (Liu et al. 2025; mu is `optim.muon.momentum`):

    M <- mu M + G                                    momentum, kept as the parameter is sharded
    N  = mu M + G        (Nesterov; else N = M)
    O  = NewtonSchulz(N)                             about the orthogonal polar factor of N, of the whole matrix
    W <- W - lr (0.2 sqrt(max(A, B)) O + decay W)    the root mean square of AdamW's update, decay decoupled

All but O is elementwise, so every rank does it on its own shard. O needs the whole matrix: `muon_exchange.py` brings it
together at its owner and back, bucket by bucket, and nothing but the momentum is kept between steps. Momentum may wait
in the host's memory (`state_staging.py`): that of the next bucket arrives while this one is orthogonalised.

Every elementwise step is one rounding (no fused multiply-add of two of them), and a matrix gets the same bits in any
batch, so that any layout computes the same update to the bit from the same gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from moefold.blueprint.muon_matrices import Dealing, MuonParameter, deal
from moefold.comm.process_groups import Group
from moefold.config.optim import MuonConfig
from moefold.optim.muon_exchange import box_views, plan_bucket
from moefold.optim.newton_schulz import orthogonalise
from moefold.optim.state_staging import Staged, Staging
from moefold.optim.trained_pieces import Piece, SavedKind, SavingOptimizer, local_of


class Muon(SavingOptimizer):
    """``layouts``: every parameter that Muon updates on this stage, in a fixed order, whether or not this rank has a
    piece of it. ``stage`` is the group of all ranks that hold the same layers."""

    def __init__(
        self,
        groups: Sequence[dict[str, object]],
        pieces: Iterable[Piece],
        layouts: Sequence[MuonParameter],
        stage: Group,
        config: MuonConfig,
        lr: float,
        staging: Staging,
        dtype: torch.dtype,
    ) -> None:
        """``dtype`` and the staging's device are those of the parameters, which a rank may have none of."""
        super().__init__(groups or [{"params": [], "weight_decay": 0.0, "lr_scale": 1.0}], {"lr": lr})
        self.config, self.staging, self._dtype, self._rank = config, staging, dtype, stage.index
        self._parameters = {piece.name: piece.parameter for piece in pieces}
        self._layouts = {layout.name: layout for layout in layouts}
        self.dealing: Dealing = deal(layouts, config.iterations)
        self._plans = [plan_bucket(self._layouts, dealt, stage) for dealt in self.dealing.matrices]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        settings = {parameter: group for group in self.param_groups for parameter in group["params"]}
        # What a rank without a piece sends.
        nothing = torch.empty(0, dtype=self._compute(self._dtype), device=self.staging.device)
        buckets = [
            {name: self._parameters[name] for name in names if name in self._parameters} for names in self.dealing.names
        ]
        momenta = self.staging.over(buckets, lambda number: self._staged(buckets[number]))
        for here, plan, momentum in zip(buckets, self._plans, momenta, strict=True):
            updates = {name: self._with_momentum(parameter, momentum[name]) for name, parameter in here.items()}
            boxes = {name: box_views(update, self._layouts[name].held[self._rank]) for name, update in updates.items()}
            shapes = [matrix.shape for matrix in plan.owned]
            by_shape = {shape: nothing.new_empty(count, *shape) for shape, count in Counter(shapes).items()}
            matrices = [by_shape[shape][place] for shape, place in _places(shapes)]
            plan.gather(boxes, matrices, nothing)
            for (rows, columns), batch_BMN in by_shape.items():
                answer_BMN = orthogonalise(batch_BMN, self.config.iterations, self.config.coefficients)
                batch_BMN.copy_(answer_BMN.mul_(self.config.rms * sqrt(max(rows, columns))))
            plan.scatter(boxes, matrices, nothing)
            for name, update in updates.items():
                group = settings[here[name]]
                _apply(local_of(here[name]), update, group["lr"], group["weight_decay"])

    def saved_kinds(self, parameter: nn.Parameter) -> dict[str, SavedKind]:
        return {"momentum": SavedKind(parameter.dtype, single=False)}

    def saved_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        self.staging.finish()
        return {"momentum": self._momentum(parameter)}

    @torch.no_grad()
    def load_saved(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> None:
        self.staging.finish()
        self._momentum(parameter).copy_(saved["momentum"])

    def stored_state(self, parameter: nn.Parameter) -> dict[str, Tensor | int]:
        self.staging.finish()
        return super().stored_state(parameter)

    def on_host(self, parameter: Tensor) -> bool:
        return self.staging.on != "device"

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        """Of this rank's part; zeros before the first update."""
        state, local = self.state[parameter], local_of(parameter)
        if "momentum" not in state:
            state["momentum"] = self.staging.zeros(local.numel(), local.dtype).view(local.shape)
        momentum: Tensor = state["momentum"]
        return momentum

    def _staged(self, bucket: Mapping[str, nn.Parameter]) -> Staged:
        momenta = {name: self._momentum(parameter) for name, parameter in bucket.items()}
        return Staged(momenta, changed=frozenset(momenta), moved=frozenset(momenta))

    def _with_momentum(self, parameter: nn.Parameter, momentum: Tensor) -> Tensor:
        """What is orthogonalised, of this rank's shard, in the format of the iterations."""
        assert parameter.grad is not None
        gradient = local_of(parameter.grad)
        momentum.mul_(self.config.momentum).add_(gradient)
        update = momentum.mul(self.config.momentum).add_(gradient) if self.config.nesterov else momentum.clone()
        return update.to(self._compute(update.dtype))

    def _compute(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.float64:
            return dtype
        return torch.bfloat16 if self.config.compute == "bfloat16" else torch.float32


def _places(shapes: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    """Each matrix's shape and its number among those of the same shape."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    found = []
    for shape in shapes:
        found.append((shape, counts[shape]))
        counts[shape] += 1
    return found


def _apply(weight: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
    weight.mul_(1.0 - lr * weight_decay)
    weight.sub_(update.to(weight.dtype).mul_(lr))
