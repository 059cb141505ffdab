"""Reinforcement learning: an engine that computes log-probs, trains on packed rollouts and streams its weights.

`Engine` is imported when it is first used, so that `import moefold.rl` does not import torch.
"""

from __future__ import annotations

# The module that defines each name.
_SOURCES = {
    "Engine": "moefold.rl.engine",
    "MatchReport": "moefold.rl.logprob_match",
    "Rollout": "moefold.rl.rollouts",
    "compare_logprobs": "moefold.rl.logprob_match",
    "group_advantages": "moefold.rl.policy_losses",
    "receive_weights": "moefold.rl.weight_transport",
    "send_weights": "moefold.rl.weight_transport",
}

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> object:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_SOURCES[name]), name)
