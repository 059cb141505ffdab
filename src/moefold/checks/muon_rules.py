"""Rules about Muon and QK-clip."""

from __future__ import annotations

from moefold.config.run import RunConfig
from moefold.errors import Problem


def momentum_decays(run: RunConfig) -> Problem | None:
    momentum = run.optim.muon.momentum
    if run.optim.algorithm != "muon" or momentum < 1:
        return None
    return Problem("optim.muon.momentum", f"is {momentum:g}: old gradients would never fade", "use 0 to 0.99")


RULES = (momentum_decays,)
