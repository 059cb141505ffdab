"""What a difference at some place usually means: the first pattern that fits a quantity's name."""

from __future__ import annotations

from fnmatch import fnmatchcase

MEANINGS = (
    ("counts", "routing differs: scores, selection, or counts not summed over all ranks of the stage"),
    ("dropped", "capacities were counted over other sets of tokens than the reference's"),
    ("loss", "the forward differs, or the loss was divided by a local count of labels"),
    ("balance/sequence", "counts of a sequence not summed over the ranks that share it, or wrong sequence boundaries"),
    ("balance/global_batch", "counts not summed over every rank, or earlier microbatches forgotten"),
    ("balance/z", "a token's logits counted on no rank or on several"),
    ("balance/*", "counts not summed over the ranks that share a microbatch, or a wrong divisor"),
    ("expert_bias/*", "the loss-free bias moved by a local load, or twice"),
    ("norm", "a shard missing from the norm, or a replicated part counted once per copy"),
    ("gradient/*.experts.down_bias", "the bias of a split expert: added by several ranks, or not summed over etp"),
    ("gradient/*.experts.*", "experts: reduction over edp, rows at the wrong expert, or the routing weight's place"),
    ("gradient/*.router.*", "router: not summed over tp, or the weights' gradient lost on the way home"),
    ("gradient/*.latent_*", "latent projection: not summed over tp"),
    ("gradient/*.shared*", "shared expert: gather and reduce around it, or its gate not summed over tp"),
    ("gradient/*q_norm.weight", "norm inside attention: not summed over the ranks that hold other heads or tokens"),
    ("gradient/*k_norm.weight", "norm inside attention: not summed over the ranks that hold other heads or tokens"),
    ("gradient/*kv_norm.weight", "norm inside attention: not summed over the ranks that hold other heads or tokens"),
    ("gradient/*norm.weight", "norm: sees its shard's tokens only, so it must be summed over tp"),
    ("gradient/*.attention.*", "attention: positions, window or mask under sequence shards, or a gather's gradient"),
    ("gradient/embedding.weight", "vocabulary rows: wrong offset, or their sum over ranks missing"),
    ("gradient/head.weight", "vocabulary rows: wrong offset, or the loss's gradient taken once per rank"),
    ("gradient/*", "dense parameter: reduction over dp (and cp) missing, averaged or doubled"),
    ("exp_avg*", "gradients agree, the clipped ones do not: norm or clipping"),
    ("parameter/*", "the update: rate, decay of the wrong kinds, or state of another parameter"),
)


def meaning_of(quantity: str) -> str:
    return next(text for pattern, text in MEANINGS if fnmatchcase(quantity, pattern))
