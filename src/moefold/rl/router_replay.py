"""Router replay: recorded experts are taken in the forward, and the router learns through them as through its own.

The engine that samples and the one that trains round differently, so for some tokens their routers choose other
experts, and the log-probs of the two differ by more than rounding. With replay the trainer takes the experts that the
sampler took (Rollout Routing Replay). Probs follow from the live logits of these experts, so gradients are exact for
the function that was computed. Balance losses and the loss-free bias count as always.

Recorded experts come in with the batch, of the whole microbatch (``Batch.experts_TMK``); every router takes its layer's
column and its rank's rows. A recomputed forward reads the same batch, so it takes the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_no_grad
from moefold.errors import ConfigError, Problem
from moefold.moe.routing_policies import RoutingPolicy, TopKAssignment
from moefold.nn.batch import Batch
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.parallel.parallelize import LocalModel

# Of a microbatch: experts of this rank's tokens by the number of the MoE layer.
_Seen = dict[int, dict[int, Tensor]]


class ReplayedRouting:
    """The experts that the batch has for this layer; ``inner`` decides where there are none."""

    def __init__(self, layer: int, inner: RoutingPolicy, seen: _Seen) -> None:
        self.layer, self.inner, self.seen = layer, inner, seen

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        live = self.inner.select(logits_tE, scores_tE, bias_E, batch, tokens)
        if batch.experts_TMK is not None:
            recorded_tK = tokens.local_shard(batch.experts_TMK[:, self.layer], batch)
            live = live._replace(experts=torch.where(recorded_tK >= 0, recorded_tK, live.experts), plain=None)
        if id(batch) in self.seen:
            self.seen[id(batch)][self.layer] = live.experts
        return live


class RouterReplay:
    """All routers of a local model, with policies that replay what a batch brings along, and record on request."""

    def __init__(self, local_model: LocalModel) -> None:
        self.local_model = local_model
        self._seen: _Seen = {}
        moe = local_model.run.model.moe
        if moe is not None and moe.router.kind == "expert_choice":
            fix = "its experts choose tokens, so a token has no list of experts to replay"
            raise ConfigError(Problem("model.moe.router.kind", "expert_choice cannot be recorded or replayed", fix))
        for layer, router in local_model.model.routers().items():
            router.routing_policy = ReplayedRouting(layer, router.routing_policy, self._seen)
            router.evaluation_policy = ReplayedRouting(layer, router.evaluation_policy, self._seen)
            # A fused kernel scores and selects at once: it cannot be told what to select.
            router.route = None

    def start_recording(self, batches: Sequence[Batch]) -> None:
        self._seen.update({id(batch): {} for batch in batches})

    def take_recorded(self, batches: Sequence[Batch]) -> list[Tensor]:
        """[T, M, K] of each microbatch on every rank that shares it: gathered over tp and cp, summed over pp."""
        model = self.local_model.run.model
        assert model.moe is not None
        routers, layers = self.local_model.model.routers(), len(self.local_model.model.moe_blocks)
        found = []
        for batch in batches:
            seen = self._seen.pop(id(batch))
            experts_TMK = torch.zeros(sum(batch.lengths), layers, model.moe.top_k, dtype=torch.int64)
            experts_TMK = experts_TMK.to(self.local_model.device)
            for layer in sorted(seen):
                experts_TMK[:, layer] = routers[layer].tokens.all_gather(seen[layer], batch)
            found.append(all_reduce_no_grad(experts_TMK, self.local_model.groups["pp"]))
        return found
