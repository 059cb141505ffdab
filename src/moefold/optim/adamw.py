"""AdamW, with weight decay on matrices only.

Norms, biases and sinks get no weight decay. DTensors and plain tensors are in separate param groups, because one fused
update cannot mix the two.

On a CPU the fused update is one memory-bound pass over a parameter, foreach would be a dozen. On a GPU foreach launches
few kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn, optim
from torch.distributed.tensor import DTensor

from moefold.config.optim import OptimConfig

NO_WEIGHT_DECAY = frozenset({"norm", "bias", "sink"})


def adamw(parameters: Iterable[tuple[nn.Parameter, str]], config: OptimConfig) -> optim.AdamW:
    """``parameters`` are pairs of a parameter and its kind in the blueprint."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    on_cpu = True
    for parameter, kind in parameters:
        on_cpu &= parameter.device.type == "cpu"
        groups.setdefault((kind not in NO_WEIGHT_DECAY, isinstance(parameter, DTensor)), []).append(parameter)
    return optim.AdamW(
        [
            {"params": members, "weight_decay": config.weight_decay if decayed else 0.0}
            for (decayed, _), members in groups.items()
        ]
        # A pipeline rank with empty stages has no parameters; torch needs at least one group.
        or [{"params": []}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=not on_cpu,
        fused=on_cpu,
    )
