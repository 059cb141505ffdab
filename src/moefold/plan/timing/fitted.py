"""Values that published runs gave the planner's constants, and how far runs lie from predictions.

Written by `moefold plan --score FOLDER --constants FILE`, never by hand.
"""

from __future__ import annotations

FITTED: dict[str, float] = {
    "gemm_bf16": 0.86,
    "gemm_fp8": 0.86,
    "gemm_fp4": 1.015,
    "fp4_sm103": 0.86,
    "gemm_sm80": 0.95,
    "gemm_sm100": 0.9041,
    "narrow_sm100": 1.2,
    "power": 1.129,
    "grouped": 1,
    "attention_forward": 0.5373,
    "attention_backward": 0.4014,
    "attention_long": 0.08708,
    "attention_sm103": 1.375,
    "attention_narrow": 0.6232,
    "scan": 0.07965,
    "traffic": 0.3447,
    "stream": 0.7994,
    "quantise": 6.06,
    "quantise_fused": 2.482,
    "compiled": 1.026,
    "launch_us": 52.56,
    "loop_us": 13.24,
    "launch_grace": 1.087,
    "gap_us": 1.038,
    "sync_us": 294.4,
    "ring_link": 0.7865,
    "ring_nic": 0.7036,
    "exchange_link": 0.55,
    "exchange_nic": 0.8728,
    "dedup_link": 0.8632,
    "dedup_nic": 1.056,
    "latency_us": 116.3,
    "efa": 0.5699,
    "efa_dedup": 0.2546,
    "efa_latency_us": 1696,
    "tensor_exposed": 0.8044,
    "tensor_hidden": 0.389,
    "expert_hidden": 0.8916,
    "context_exposed": 0.3135,
    "data_exposed": 0.2492,
    "contention": 0.3562,
    "stage_exposed": 0.1929,
    "fsdp2": 1.171,
    "ring_fsdp2": 0.1358,
    "deepspeed": 0.917,
    "jax": 0.9715,
    "year": 0.06635,
    "step_ms": 19.05,
}
# Measured over predicted step times: percentiles that hold 80 % of the runs of a leak group left out.
INTERVALS: dict[str, tuple[float, float]] = {
    "dense": (0.868, 1.118),
    "moe": (0.844, 1.352),
    "deepspeed dense": (0.801, 1.211),
    "fsdp2 dense": (0.727, 1.714),
    "megatron dense": (0.925, 1.105),
    "megatron moe": (0.863, 1.247),
}
# Variances of log(measured / predicted), what two runs have in common and what each has of its own: by kind
# of model, who measured the anchor, and how near it is (`timing/anchoring.py`).
ANCHORS: dict[str, tuple[float, float]] = {
    "moe own model": (0.0256, 0.0213),
    "moe own framework": (0.0030, 0.0220),
    "moe own none": (0.0000, 0.0273),
    "moe published model": (0.0009, 0.0268),
    "moe published framework": (0.0000, 0.0279),
    "moe published gpu": (0.0000, 0.0565),
    "moe published none": (0.0009, 0.0336),
    "dense own model": (0.0050, 0.0140),
    "dense own framework": (0.0000, 0.0129),
    "dense own none": (0.0000, 0.0051),
    "dense published model": (0.0000, 0.0170),
    "dense published framework": (0.0000, 0.0156),
    "dense published gpu": (0.0000, 0.0273),
    "dense published none": (0.0002, 0.0159),
}
