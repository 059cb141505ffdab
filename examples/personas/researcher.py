"""A researcher with a new router: one class, tried on a layer, trained beside the usual router, proven on four ranks.

"Threshold top-k" takes a token's best expert always, and its second best only if that one's score is close.
"""

import time

import torch
from torch import Tensor

import moefold

started = time.time()


class ThresholdTopK:
    def __init__(self, top_k: int, ratio: float) -> None:
        self.top_k, self.ratio = top_k, ratio

    def select(self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch, tokens):
        score_tK, expert_tK = scores_tE.topk(self.top_k)
        return moefold.TopKAssignment(expert_tK, score_tK >= self.ratio * score_tK[:, :1])


class Losses(moefold.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_step(self, record, control) -> None:
        self.seen.append(record.loss)


if __name__ == "__main__":
    policy = ThresholdTopK(top_k=2, ratio=0.8)

    # One layer on a tensor: how many experts does a token use?
    torch.manual_seed(0)
    layer = moefold.MoELayer.from_config(dim=16, num_experts=8, top_k=2, init_std=0.5, routing_policy=policy)
    _, report = layer.forward_with_report(torch.randn(256, 16))
    per_token = report.counts_E.sum().item() / 256
    print(f"{per_token:.2f} experts per token instead of 2")

    # Trained for as many steps as the usual router, from the same weights on the same data.
    final = {}
    for name, router in (("usual", None), ("threshold", policy)):
        run = moefold.load_run("debug_tiny", {"name": name, "train.steps": 40, "optim.lr": 2e-3})
        losses = Losses()
        moefold.Trainer(run, callbacks=[losses], reporters=[], routing_policy=router).fit()
        final[name] = losses.seen
        print(f"{name}: {losses.seen[0]:.3f} -> {losses.seen[-1]:.3f}")

    # Four ranks compute what one process computes. A router that looked at its own rank's tokens only would not.
    layout = moefold.load_run("debug_tiny", {"parallel.ep": 2, "parallel.tp": 2})
    verdict = moefold.prove(layout, world=4, routing_policy=policy)
    print(f"proof: {len(verdict.rows)} quantities, largest relative error {verdict.worst:.1e}")

    assert 1 < per_token < 2
    assert all(seen[-1] < 0.9 * seen[0] for seen in final.values()) and final["usual"] != final["threshold"]
    assert verdict.holds
    minutes = (time.time() - started) / 60
    print(f"researcher: done in {minutes:.1f} minutes")
