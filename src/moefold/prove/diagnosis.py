"""What a difference at some place usually means: the first pattern that fits a quantity's name."""

from __future__ import annotations

from fnmatch import fnmatchcase

MEANINGS = (
    ("counts", "routing differs: scores, selection, or counts not summed over all ranks of the stage"),
    ("plain", "the top-k that balance losses count has a bias, groups or pads in it, or was not summed over all ranks"),
    ("kept", "capacities were counted over other sets, or other choices went first where there was no room"),
    ("dropped", "capacities were counted over other sets of tokens than the reference's"),
    ("loss", "the forward differs, labels were counted on some ranks only, or losses not summed over dp and cp"),
    ("ahead", "losses further ahead: tokens or labels shifted, past a document's end, or modules added, not averaged"),
    (
        "balance/sequence",
        "counts of a document not summed over the ranks that share it, or wrong ends or number of documents",
    ),
    (
        "balance/global_batch",
        "counts not summed over every rank, or earlier microbatches forgotten or of another layer",
    ),
    ("balance/z", "a token's logits counted on no rank or on several, or pads counted"),
    ("balance/*", "counts not summed over the ranks that share a microbatch, pads counted, or a wrong divisor"),
    ("expert_bias/*", "the loss-free bias moved by a local load, or twice"),
    ("grad_norm", "a shard missing from the norm, or a part counted once per copy or once per stage that holds it"),
    ("gradient/*.experts.down_bias", "the bias of a split expert: added by several ranks, or not summed over etp"),
    ("gradient/*.experts.*", "experts: reduction over edp, rows at the wrong expert, or the routing weight's place"),
    (
        "gradient/*.router.*",
        "router: not summed over tp, balance losses of its stage forgotten, or the weights' gradient lost",
    ),
    ("gradient/*.latent_*", "latent projection: not summed over tp"),
    ("gradient/*.shared*", "shared expert: gather and reduce around it, or its gate not summed over tp"),
    ("gradient/mtp.*.join.weight", "module that looks ahead: its tokens, its stream, or not summed over tp"),
    ("gradient/mtp.*.token_norm.weight", "module that looks ahead: its tokens, or not summed over tp"),
    ("gradient/mtp.*.hidden_norm.weight", "module that looks ahead: the stream it was handed, or not summed over tp"),
    ("gradient/mtp_norms.*", "norm after a module that looks ahead: its stream's gradient, or not summed over tp"),
    (
        "gradient/final_norm.weight",
        "final norm: read by the head and by the first module that looks ahead, on any stage",
    ),
    ("gradient/*q_norm.weight", "norm inside attention: not summed over the ranks that hold other heads or tokens"),
    ("gradient/*k_norm.weight", "norm inside attention: not summed over the ranks that hold other heads or tokens"),
    ("gradient/*kv_norm.weight", "norm inside attention: not summed over the ranks that hold other heads or tokens"),
    ("gradient/*norm.weight", "norm: sees its shard's tokens only, so it must be summed over tp"),
    ("gradient/*.attention.sinks", "sinks: merged once per part, or their parts not summed over cp"),
    (
        "gradient/*.attention.*",
        "attention: positions, window or ends of documents under shards, keys' gradients not home, a gather's gradient",
    ),
    (
        "gradient/embedding.weight",
        "vocabulary rows: wrong offset, or a sum missing over ranks, or over stages that share them",
    ),
    ("gradient/head.weight", "vocabulary rows: wrong offset, or the loss's gradient taken once per rank"),
    (
        "gradient/*",
        "dense parameter: reduction over dp and cp missing, averaged or doubled, or a microbatch's gradient lost",
    ),
    ("exp_avg*", "gradients agree, the clipped ones do not: norm or clipping"),
    ("parameter/*", "the update: rate, decay of the wrong kinds, or state of another parameter"),
)


def meaning_of(quantity: str) -> str:
    return next(text for pattern, text in MEANINGS if fnmatchcase(quantity, pattern))
