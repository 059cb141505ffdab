"""Values that published runs gave the planner's constants, and how far runs lie from predictions.

Written by `moefold plan --score FOLDER --constants FILE`, never by hand.
"""

from __future__ import annotations

FITTED: dict[str, float] = {
    "gemm_bf16": 0.8656,
    "gemm_fp8": 0.9846,
    "gemm_fp4": 1.229,
    "gemm_sm80": 0.5956,
    "gemm_sm100": 0.8247,
    "narrow_sm100": 1.167,
    "power": 0.9681,
    "grouped": 1.027,
    "attention_forward": 0.5396,
    "attention_backward": 0.3979,
    "attention_long": 0.09198,
    "attention_sm103": 1.421,
    "scan": 0.0944,
    "traffic": 0.304,
    "quantise": 4.304,
    "quantise_fused": 2.677,
    "compiled": 1.078,
    "launch_us": 43.85,
    "loop_us": 14.03,
    "launch_grace": 1.077,
    "gap_us": 1.015,
    "sync_us": 479,
    "ring_link": 0.7992,
    "ring_nic": 0.7135,
    "exchange_link": 0.4269,
    "exchange_nic": 0.8998,
    "dedup_link": 0.9243,
    "dedup_nic": 1.117,
    "latency_us": 104.7,
    "efa": 0.5956,
    "efa_dedup": 0.2237,
    "efa_latency_us": 1417,
    "tensor_exposed": 0.9063,
    "tensor_hidden": 0.4443,
    "expert_hidden": 0.8827,
    "context_exposed": 0.2958,
    "data_exposed": 0.2572,
    "contention": 0.3612,
    "stage_exposed": 0.227,
    "fsdp2": 1.182,
    "ring_fsdp2": 0.1461,
    "deepspeed": 1.213,
    "jax": 0.9481,
    "year": 0.08756,
    "step_ms": 11.14,
}
# Measured over predicted step times: percentiles that hold 80 % of the runs of a leak group left out.
INTERVALS: dict[str, tuple[float, float]] = {
    "dense": (0.833, 1.192),
    "moe": (0.852, 1.334),
    "deepspeed dense": (0.816, 1.425),
    "fsdp2 dense": (0.740, 1.556),
    "megatron dense": (0.921, 1.098),
    "megatron moe": (0.857, 1.326),
}
# Variances of log(measured / predicted), what two runs have in common and what each has of its own: by kind
# of model, who measured the anchor, and how near it is (`timing/anchoring.py`).
ANCHORS: dict[str, tuple[float, float]] = {
    "moe own model": (0.0194, 0.0194),
    "moe own framework": (0.0029, 0.0252),
    "moe own none": (0.0000, 0.0322),
    "moe published model": (0.0065, 0.0277),
    "moe published framework": (0.0000, 0.0307),
    "moe published gpu": (0.0012, 0.0523),
    "moe published none": (0.0006, 0.0350),
    "dense own model": (0.0064, 0.0147),
    "dense own framework": (0.0000, 0.0151),
    "dense own none": (0.0000, 0.0059),
    "dense published model": (0.0000, 0.0154),
    "dense published framework": (0.0002, 0.0180),
    "dense published gpu": (0.0000, 0.0232),
    "dense published none": (0.0002, 0.0173),
}
