"""Values that published runs gave the planner's constants, and how far runs lie from predictions.

Written by `moefold plan --score FOLDER --constants FILE`, never by hand.
"""

from __future__ import annotations

FITTED: dict[str, float] = {
    "gemm_bf16": 0.8764,
    "gemm_fp8": 0.996,
    "gemm_fp4": 1.223,
    "gemm_sm80": 0.5829,
    "gemm_sm100": 0.8296,
    "narrow_sm100": 1.161,
    "power": 1.008,
    "grouped": 1.029,
    "attention_forward": 0.5374,
    "attention_backward": 0.3767,
    "attention_long": 0.08396,
    "attention_sm103": 1.443,
    "scan": 0.09001,
    "traffic": 0.3079,
    "quantise": 4.372,
    "quantise_fused": 2.604,
    "compiled": 1.004,
    "launch_us": 43.36,
    "loop_us": 14.07,
    "launch_grace": 1.086,
    "gap_us": 1.017,
    "sync_us": 502.2,
    "ring_link": 0.8035,
    "ring_nic": 0.7131,
    "exchange_link": 0.4289,
    "exchange_nic": 0.8963,
    "dedup_link": 0.9255,
    "dedup_nic": 1.119,
    "latency_us": 105.6,
    "efa": 0.5977,
    "efa_dedup": 0.2218,
    "efa_latency_us": 1415,
    "tensor_exposed": 0.9014,
    "tensor_hidden": 0.4483,
    "expert_hidden": 0.8817,
    "context_exposed": 0.2859,
    "data_exposed": 0.2595,
    "contention": 0.3565,
    "stage_exposed": 0.2227,
    "fsdp2": 1.227,
    "deepspeed": 1.213,
    "jax": 0.9599,
    "year": 0.09781,
    "step_ms": 11.24,
}
# Measured over predicted step times: the tenth and the ninetieth percentile of runs left out.
INTERVALS: dict[str, tuple[float, float]] = {
    "dense": (0.861, 1.151),
    "mixture": (0.860, 1.300),
}
