"""AdamW, with decay on matrices only.

Norms, biases and sinks are scales and offsets: pulling them to zero changes what the model can say, not how big it is.
Sharded and plain parameters are kept in groups of their own, because one fused update cannot mix the two.

On a CPU the update of a parameter is one pass over it; torch's list-wise form would be a dozen, as memory is slower
than arithmetic. On a GPU the list-wise form is what launches few kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn, optim
from torch.distributed.tensor import DTensor

from moefold.config.optim import OptimConfig

UNDECAYED = frozenset({"norm", "bias", "sink"})


def adamw(parameters: Iterable[tuple[nn.Parameter, str]], config: OptimConfig) -> optim.AdamW:
    """``parameters`` come with their kind, as the blueprint names it."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    on_cpu = True
    for parameter, kind in parameters:
        on_cpu &= parameter.device.type == "cpu"
        groups.setdefault((kind not in UNDECAYED, isinstance(parameter, DTensor)), []).append(parameter)
    return optim.AdamW(
        [
            {"params": members, "weight_decay": config.weight_decay if decayed else 0.0}
            for (decayed, _), members in groups.items()
        ]
        # A pipeline rank whose stages are empty has nothing to update, and updates it.
        or [{"params": []}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=not on_cpu,
        fused=on_cpu,
    )
