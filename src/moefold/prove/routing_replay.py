"""Record the routing of the reference, and replay it on the ranks.

In float32 and bfloat16 two layouts round activations differently, and a token whose best experts have almost equal
scores may be routed differently. That is no error of the layout, yet it changes everything after it. So a proof in
these formats compares the arithmetic under equal routing; that the routing agrees is shown by the float64 proof.

The reference routes all microbatches of a wave at once; what it recorded is kept by router and wave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from moefold.model.decoder import Decoder
from moefold.moe.router import Router
from moefold.moe.routing_policies import DropPolicy, TopKAssignment
from moefold.nn.batch import Batch
from moefold.nn.parallel_interfaces import TokenSharding


def named_routers(model: Decoder) -> dict[str, Router]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


class _Recorder:
    """Selects as the router's own policy does, and records the assignment."""

    def __init__(self, router: Router, name: str, into: dict[str, Tensor]) -> None:
        self.router, self.inner, self.name, self.into = router, router.routing_policy, name, into
        self.wave = -1

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        assignment = self.inner.select(logits_tE, scores_tE, bias_E, batch, tokens)
        plain_tK = self.router.plain_topk(logits_tE, assignment)
        self.wave += 1
        self.into[f"{self.name}/{self.wave}/expert"] = assignment.experts.contiguous()
        self.into[f"{self.name}/{self.wave}/plain"] = plain_tK.clone()
        if assignment.kept is not None:
            self.into[f"{self.name}/{self.wave}/kept"] = assignment.kept.contiguous()
        return assignment._replace(plain=plain_tK)


class _DropRecorder:
    """Drops as ``inner`` does, and records which assignments were kept."""

    def __init__(self, inner: DropPolicy, name: str, into: dict[str, Tensor]) -> None:
        self.inner, self.name, self.into = inner, name, into
        self.wave = -1

    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        kept_tK = self.inner.kept(expert_tK, prob_tK, batch, tokens)
        self.wave += 1
        self.into[f"{self.name}/{self.wave}/within_capacity"] = kept_tK.contiguous()
        return kept_tK


class _ReplayInOrder:
    """Assigns and drops as the reference did, wave after wave."""

    def __init__(self, recorded: dict[str, Tensor], name: str) -> None:
        self.recorded, self.name, self.wave = recorded, name, -1

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        self.wave += 1
        expert, kept, plain = (self._of_wave(what) for what in ("expert", "kept", "plain"))
        assert expert is not None
        return TopKAssignment(expert, kept, plain)

    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        kept_tK = self._of_wave("within_capacity")
        assert kept_tK is not None
        return kept_tK

    def _of_wave(self, what: str) -> Tensor | None:
        return self.recorded.get(f"routing/{self.name}/{self.wave}/{what}")


def replay_in_order(model: Decoder, recorded: dict[str, Tensor]) -> None:
    """For a model of the reference, which runs every wave once, as a whole."""
    for name, router in named_routers(model).items():
        replay = _ReplayInOrder(recorded, name)
        router.routing_policy = replay
        router.drop = None if router.drop is None else replay


class _Replay:
    """Assigns and drops as the reference did in the wave of this batch, in forward and in recomputation.

    Batches are told apart by identity: the model hands them on as they are.
    """

    def __init__(self) -> None:
        self.assignments: dict[int, TopKAssignment] = {}
        self.within_capacity: dict[int, Tensor] = {}

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        return self.assignments[id(batch)]

    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        return self.within_capacity[id(batch)]


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


def replay_routing(
    model: Decoder, recorded: dict[str, Tensor], rows: Sequence[slice], batches: Sequence[Batch]
) -> None:
    """Give every router this rank's part of the recorded routing; ``rows`` are its microbatch's in each wave."""
    for name, router in named_routers(model).items():
        replay = _Replay()
        for wave, (batch, part) in enumerate(zip(batches, rows, strict=True)):
            device = batch.tokens_S.device
            own = {
                what: router.tokens.local_shard(recorded[key][part].to(device), batch)
                for what in ("expert", "kept", "plain", "within_capacity")
                if (key := f"routing/{name}/{wave}/{what}") in recorded
            }
            replay.assignments[id(batch)] = TopKAssignment(own["expert"], own.get("kept"), own["plain"])
            if "within_capacity" in own:
                replay.within_capacity[id(batch)] = own["within_capacity"]
        # A fused kernel scores and selects at once: it cannot be told what to select.
        router.routing_policy, router.route = replay, None
        router.drop = replay if replay.within_capacity else None
