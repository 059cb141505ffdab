"""Routing recorded and replayed: the experts of every token go out of one forward and into another.

Replay: recorded experts are taken in the forward, and the router learns through them as through its own. Probs follow
from the live logits of these experts, so gradients are exact for the function that was computed. Balance losses and the
loss-free bias count as always. Two things need it. The engine that samples and the one that trains round differently,
so for some tokens their routers choose other experts, and the log-probs of the two differ by more than rounding
(Rollout Routing Replay). And a recorded run can be trained again under the same routing (`train/routing_trace.py`).

Recorded experts come in with the batch, of the whole microbatch (``Batch.experts_TMK``); every router takes its layer's
column and its rank's rows. A recomputed forward reads the same batch, so it takes the same experts.

Recording reads what a router returns and changes nothing: a run that is recorded has the bits of one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_no_grad
from moefold.errors import ConfigError, MoefoldError, Problem
from moefold.moe.dispatch.base import Routing
from moefold.moe.load_balancing import RoutingReport
from moefold.moe.router import Router
from moefold.moe.routing_policies import RoutingPolicy, TopKAssignment
from moefold.moe.topk import real_tokens
from moefold.nn.batch import Batch
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.parallel.parallelize import LocalModel


class ReplayedRouting:
    """The experts that the batch has for this layer; ``inner`` decides where there are none."""

    def __init__(self, layer: int, inner: RoutingPolicy) -> None:
        self.layer, self.inner = layer, inner

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        live = self.inner.select(logits_tE, scores_tE, bias_E, batch, tokens)
        if batch.experts_TMK is None:
            return live
        recorded_tK = tokens.local_shard(batch.experts_TMK[:, self.layer], batch)
        return live._replace(experts=torch.where(recorded_tK >= 0, recorded_tK, live.experts), plain=None)


def replay_routing_of_batches(local_model: LocalModel) -> None:
    """From now on every router takes the experts that a batch brings along."""
    _require_lists_of_experts(local_model)
    for layer, router in local_model.model.routers().items():
        router.routing_policy = ReplayedRouting(layer, router.routing_policy)
        router.evaluation_policy = ReplayedRouting(layer, router.evaluation_policy)
        # A fused kernel scores and selects at once: it cannot be told what to select.
        router.route = None


class RoutingRecorder:
    """Records, on request, the experts of all tokens of some microbatches."""

    def __init__(self, local_model: LocalModel) -> None:
        _require_lists_of_experts(local_model)
        self.local_model = local_model
        # By the microbatch's tokens, which stay the same tensor when other fields of a batch are replaced: this rank's
        # experts by the number of the MoE layer.
        self._seen: dict[int, dict[int, Tensor]] = {}
        for layer, router in local_model.model.routers().items():
            router.register_forward_hook(self._hook(layer))

    def start_recording(self, batches: Sequence[Batch]) -> None:
        self._seen = {id(batch.tokens_S): {} for batch in batches}

    def take_recorded(self, batches: Sequence[Batch]) -> list[Tensor]:
        """[T, M, K] of each microbatch on every rank that shares it: gathered over tp and cp, summed over pp; -1 for
        padding."""
        model = self.local_model.run.model
        assert model.moe is not None
        routers, layers = self.local_model.model.routers(), len(self.local_model.model.moe_blocks)
        found = []
        for batch in batches:
            seen = self._seen.pop(id(batch.tokens_S))
            if seen.keys() != routers.keys():
                missing = sorted(routers.keys() - seen.keys())
                raise MoefoldError(f"routers of MoE layers {missing} did not run on a microbatch that was recorded")
            experts_TMK = torch.zeros(sum(batch.lengths), layers, model.moe.top_k, dtype=torch.int64)
            experts_TMK = experts_TMK.to(self.local_model.device)
            for layer in sorted(seen):
                experts_TMK[:, layer] = routers[layer].tokens.all_gather(seen[layer], batch)
            found.append(all_reduce_no_grad(experts_TMK, self.local_model.groups["pp"]))
        return found

    def _hook(self, layer: int) -> Callable[[Router, tuple[object, ...], tuple[Routing, RoutingReport]], None]:
        def record(router: Router, given: tuple[object, ...], found: tuple[Routing, RoutingReport]) -> None:
            batch = given[1]
            assert isinstance(batch, Batch)
            if (seen := self._seen.get(id(batch.tokens_S))) is None:
                return
            real_t, experts_tK = real_tokens(batch, router.tokens), found[0].experts.detach()
            seen[layer] = experts_tK if real_t is None else experts_tK.where(real_t[:, None], -1)

        return record


def _require_lists_of_experts(local_model: LocalModel) -> None:
    moe = local_model.run.model.moe
    if moe is not None and moe.router.kind == "expert_choice":
        fix = "its experts choose tokens, so a token has no list of experts to replay"
        raise ConfigError(Problem("model.moe.router.kind", "expert_choice cannot be recorded or replayed", fix))
