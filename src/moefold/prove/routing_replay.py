"""Record the routing of the reference, and replay it on the ranks.

In bfloat16 two layouts round activations differently, and a token whose best experts have almost equal scores may be
routed differently. That is no error of the layout, yet it changes everything after it. So a proof in bfloat16 compares
the arithmetic under equal routing; that the routing agrees is shown by the float64 proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from moefold.model.decoder import Decoder
from moefold.moe.router import Router
from moefold.moe.routing_policies import DropPolicy, ReplayRouting, TopKAssignment
from moefold.nn.batch import Batch
from moefold.nn.parallel_interfaces import TokenSharding


def named_routers(model: Decoder) -> dict[str, Router]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


class _Recorder:
    """Selects as the router's own policy does, and records the assignment."""

    def __init__(self, router: Router, name: str, into: dict[str, Tensor]) -> None:
        self.router, self.inner, self.name, self.into = router, router.routing_policy, name, into

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        assignment = self.inner.select(logits_tE, scores_tE, bias_E, batch, tokens)
        plain_tK = self.router.plain_topk(logits_tE, assignment)
        self.into[f"{self.name}/expert"] = assignment.experts.contiguous()
        self.into[f"{self.name}/plain"] = plain_tK.clone()
        if assignment.kept is not None:
            self.into[f"{self.name}/kept"] = assignment.kept.contiguous()
        return assignment._replace(plain=plain_tK)


class _DropRecorder:
    """Drops as ``inner`` does, and records which assignments were kept."""

    def __init__(self, inner: DropPolicy, name: str, into: dict[str, Tensor]) -> None:
        self.inner, self.name, self.into = inner, name, into

    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        kept_tK = self.inner.kept(expert_tK, prob_tK, batch, tokens)
        self.into[f"{self.name}/within_capacity"] = kept_tK.contiguous()
        return kept_tK


class _ReplayDrop:
    """Keeps the assignments that the reference kept."""

    def __init__(self, kept_tK: Tensor) -> None:
        self.kept_tK = kept_tK

    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        return self.kept_tK


@contextmanager
def record_routing(model: Decoder) -> Iterator[dict[str, Tensor]]:
    """The last routing of every router inside the with block."""
    recorded: dict[str, Tensor] = {}
    routers = named_routers(model)
    before = {name: (router.routing_policy, router.drop) for name, router in routers.items()}
    for name, router in routers.items():
        router.routing_policy = _Recorder(router, name, recorded)
        router.drop = None if router.drop is None else _DropRecorder(router.drop, name, recorded)
    yield recorded
    for name, router in routers.items():
        router.routing_policy, router.drop = before[name]


def replay_routing(model: Decoder, recorded: dict[str, Tensor], dp_index: int, batches: Sequence[Batch]) -> None:
    """Give every router this rank's rows of the recorded routing, which is that of one wave."""
    (batch,) = batches
    rows = slice(dp_index * batch.num_tokens, (dp_index + 1) * batch.num_tokens)
    for name, router in named_routers(model).items():
        own = {
            what: router.tokens.local_shard(recorded[f"routing/{name}/{what}"][rows], batch)
            for what in ("expert", "kept", "plain", "within_capacity")
            if f"routing/{name}/{what}" in recorded
        }
        router.routing_policy = ReplayRouting(TopKAssignment(own["expert"], own.get("kept"), own["plain"]))
        router.drop = _ReplayDrop(own["within_capacity"]) if "within_capacity" in own else None
