"""Record which experts the reference chose, and let the ranks choose the same.

In bfloat16 two layouts round activations differently, and a token whose two best experts score almost alike may go one
way here and the other way there. That is not an error of the layout, yet it changes everything after it. So a proof in
bfloat16 compares the arithmetic under equal choices; whether choices agree is what the float64 proof shows.
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
    """Selects as ``inner`` does, and writes down what it chose."""

    def __init__(self, router: Router, name: str, into: dict[str, Tensor]) -> None:
        self.router, self.inner, self.name, self.into = router, router.routing_policy, name, into

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        choice = self.inner.select(logits_tE, scores_tE, bias_E, batch, tokens)
        plain_tK = self.router.plain_topk(logits_tE, choice)
        self.into[f"{self.name}/expert"] = choice.experts.contiguous()
        self.into[f"{self.name}/plain"] = plain_tK.clone()
        if choice.kept is not None:
            self.into[f"{self.name}/kept"] = choice.kept.contiguous()
        return choice._replace(plain=plain_tK)


class _DropRecorder:
    """The same for who was dropped."""

    def __init__(self, inner: DropPolicy, name: str, into: dict[str, Tensor]) -> None:
        self.inner, self.name, self.into = inner, name, into

    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        kept_tK = self.inner.kept(expert_tK, prob_tK, batch, tokens)
        self.into[f"{self.name}/within_capacity"] = kept_tK.contiguous()
        return kept_tK


class _ReplayDrop:
    """Drops whom the reference dropped."""

    def __init__(self, kept_tK: Tensor) -> None:
        self.kept_tK = kept_tK

    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        return self.kept_tK


@contextmanager
def record_choices(model: Decoder) -> Iterator[dict[str, Tensor]]:
    """The last choices of every router made inside the block."""
    choices: dict[str, Tensor] = {}
    routers = named_routers(model)
    before = {name: (router.routing_policy, router.drop) for name, router in routers.items()}
    for name, router in routers.items():
        router.routing_policy = _Recorder(router, name, choices)
        router.drop = None if router.drop is None else _DropRecorder(router.drop, name, choices)
    yield choices
    for name, router in routers.items():
        router.routing_policy, router.drop = before[name]


def replay_choices(model: Decoder, recorded: dict[str, Tensor], dp_index: int, batches: Sequence[Batch]) -> None:
    """Hand every router its part of the recorded choices; one wave only, so that there is one choice per router."""
    (batch,) = batches
    rows = slice(dp_index * batch.num_tokens, (dp_index + 1) * batch.num_tokens)
    for name, router in named_routers(model).items():
        mine = {
            what: router.tokens.local_shard(recorded[f"choice/{name}/{what}"][rows], batch)
            for what in ("expert", "kept", "plain", "within_capacity")
            if f"choice/{name}/{what}" in recorded
        }
        router.routing_policy = ReplayRouting(TopKAssignment(mine["expert"], mine.get("kept"), mine["plain"]))
        router.drop = _ReplayDrop(mine["within_capacity"]) if "within_capacity" in mine else None
