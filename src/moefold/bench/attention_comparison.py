"""`bench attention`: moefold's operation beside torch's fused call on the same blocks."""

from __future__ import annotations

from dataclasses import asdict

from moefold.bench.attention_shapes import AttentionShape
from moefold.bench.attentions import BARE, CONTESTANTS
from moefold.bench.comparison import Say, hold_contest
from moefold.bench.layer_comparison import TOLERANCES, Setting, threads_text
from moefold.bench.results import ALIKE, Contest, Entrant

BASES = tuple(BARE)


def bench_attention(shape: AttentionShape, setting: Setting, say: Say = lambda what, done, total: None) -> Contest:
    """Everybody keeps freed memory: it is the operation that is compared."""
    options = {
        "shape": asdict(shape),
        "dtype": setting.dtype,
        "threads": setting.threads,
        "allocator": "kept",
    }
    return hold_contest(
        "attention",
        f"attention: {shape}, {setting.dtype}, {threads_text(setting.threads)}, forward and backward",
        [Entrant(name, "bare" if name in BARE else "ours", options) for name in CONTESTANTS],
        rounds=setting.rounds,
        warm=setting.warm,
        routings=(ALIKE,),
        tolerance=TOLERANCES[setting.dtype],
        say=say,
    )
