"""Values that published runs gave the planner's constants, and how far runs lie from predictions.

Written by `moefold plan --score FOLDER --constants FILE`, never by hand.
"""

from __future__ import annotations

FITTED: dict[str, float] = {
    "gemm_bf16": 0.8765,
    "gemm_fp8": 0.9962,
    "gemm_fp4": 1.223,
    "gemm_sm80": 0.583,
    "gemm_sm100": 0.8293,
    "narrow_sm100": 1.162,
    "power": 1.008,
    "grouped": 1.029,
    "attention_forward": 0.5374,
    "attention_backward": 0.3767,
    "attention_long": 0.08399,
    "attention_sm103": 1.442,
    "scan": 0.09012,
    "traffic": 0.3078,
    "quantise": 4.373,
    "quantise_fused": 2.603,
    "compiled": 1.004,
    "launch_us": 43.37,
    "loop_us": 14.08,
    "launch_grace": 1.087,
    "gap_us": 1.017,
    "sync_us": 500,
    "ring_link": 0.8034,
    "ring_nic": 0.7131,
    "exchange_link": 0.4289,
    "exchange_nic": 0.8963,
    "dedup_link": 0.9258,
    "dedup_nic": 1.119,
    "latency_us": 105.6,
    "efa": 0.5976,
    "efa_dedup": 0.2219,
    "efa_latency_us": 1416,
    "tensor_exposed": 0.9014,
    "tensor_hidden": 0.4484,
    "expert_hidden": 0.8816,
    "context_exposed": 0.2857,
    "data_exposed": 0.2595,
    "contention": 0.3565,
    "stage_exposed": 0.2228,
    "fsdp2": 1.227,
    "deepspeed": 1.213,
    "jax": 0.96,
    "year": 0.098,
    "step_ms": 11.19,
}
# Measured over predicted step times: the tenth and the ninetieth percentile of runs left out.
INTERVALS: dict[str, tuple[float, float]] = {
    "dense": (0.861, 1.151),
    "mixture": (0.860, 1.300),
}
