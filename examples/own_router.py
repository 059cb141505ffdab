"""An own router in 30 lines, proven on 4 ranks.

A routing policy turns scores into assignments. This one is "threshold top-k": a token takes its best expert, and its
second best only if that one's score is close to the best. Some tokens so use one expert and some two.
"""

# %% The policy: one class with one method.
import torch
from torch import Tensor

import moefold


class ThresholdTopK:
    """The best expert always; each further one of the top-k if its score is at least `ratio` of the best."""

    def __init__(self, top_k: int, ratio: float) -> None:
        self.top_k, self.ratio = top_k, ratio

    def select(self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch, tokens):
        # t tokens of this rank, E experts, K = top_k. The loss-free bias, if the config has one, shifts the selection.
        value_tE = scores_tE if bias_E is None else scores_tE + bias_E
        score_tK, expert_tK = value_tE.topk(self.top_k)
        kept_tK = score_tK >= self.ratio * score_tK[:, :1]
        # Where `kept_tK` is false there is no assignment. Probs follow from the scores, as configured.
        return moefold.TopKAssignment(expert_tK, kept_tK)


# %% Try it on one layer.
torch.manual_seed(0)
layer = moefold.MoELayer.from_config(
    dim=16, num_experts=8, top_k=2, init_std=0.5, routing_policy=ThresholdTopK(top_k=2, ratio=0.8)
)
_, report = layer.forward_with_report(torch.randn(256, 16))
per_token = report.counts_E.sum().item() / 256
print(f"{per_token:.2f} experts per token")
assert 1 < per_token < 2

# %% Train with it: the run's own config stays as it is, the object is handed over.
run = moefold.load_run("debug_tiny", {"parallel.ep": 2, "parallel.tp": 2})
model = moefold.build_model(run, routing_policy=ThresholdTopK(top_k=2, ratio=0.8))
ids = torch.randint(256, (2, 33))
print(f"loss before training: {model(ids[:, :-1], labels=ids[:, 1:]).loss.item():.3f}")

# %% Prove it: 4 processes with tensor and expert parallelism against one process. Loss, gradients, the update and token
# counts must agree to 1e-9 in float64. The policy looks at one token at a time, so no layout can change its decisions.
verdict = moefold.prove(run, world=4, routing_policy=ThresholdTopK(top_k=2, ratio=0.8))
print(f"{len(verdict.rows)} quantities compared, largest relative error {verdict.worst:.1e}: holds = {verdict.holds}")
assert verdict.holds


# %% What a wrong router looks like. This one prefers experts by the mean score of the tokens that *this rank* holds: on
# four ranks the means are four others, and the proof says where it shows first.
class FollowsTheLocalMean:
    def select(self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch, tokens):
        return moefold.TopKAssignment((scores_tE + scores_tE.mean(0)).topk(2).indices)


verdict = moefold.prove(run, world=4, routing_policy=FollowsTheLocalMean())
print(f"holds = {verdict.holds}; first seen in: {verdict.culprit}")
assert not verdict.holds


# %% The right way to look at several tokens: bring the whole microbatch together, decide, take this rank's part.
class FollowsTheMicrobatchMean:
    def select(self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch, tokens):
        # T tokens of the microbatches; each microbatch has its own mean.
        scores_TE = tokens.all_gather(scores_tE, batch)
        mean_TE = torch.cat([part.mean(0).expand_as(part) for part in scores_TE.split(batch.microbatches.sizes)])
        return moefold.TopKAssignment(tokens.local_shard((scores_TE + mean_TE).topk(2).indices, batch))


verdict = moefold.prove(run, world=4, routing_policy=FollowsTheMicrobatchMean())
print(f"holds = {verdict.holds}, largest relative error {verdict.worst:.1e}")
assert verdict.holds
