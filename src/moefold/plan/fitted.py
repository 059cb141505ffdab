"""Values that published runs gave the planner's constants, and how far runs lie from predictions.

Written by `moefold plan --score FOLDER --constants FILE`, never by hand.
"""

from __future__ import annotations

FITTED: dict[str, float] = {
    "gemm_bf16": 0.8832,
    "gemm_fp8": 1.003,
    "gemm_fp4": 1.184,
    "gemm_sm80": 0.6054,
    "gemm_sm100": 0.7935,
    "narrow_sm100": 1.16,
    "power": 0.9226,
    "grouped": 1.047,
    "attention_forward": 0.534,
    "attention_backward": 0.3465,
    "attention_long": 0.07098,
    "attention_sm103": 1.497,
    "scan": 0.08948,
    "traffic": 0.3151,
    "quantise": 4.63,
    "quantise_fused": 2.564,
    "compiled": 0.9973,
    "launch_us": 43.39,
    "loop_us": 14.6,
    "launch_grace": 1.103,
    "gap_us": 1.015,
    "sync_us": 448.2,
    "ring_link": 0.8041,
    "ring_nic": 0.7122,
    "exchange_link": 0.4249,
    "exchange_nic": 0.8858,
    "dedup_link": 0.9141,
    "dedup_nic": 1.107,
    "latency_us": 103.4,
    "efa": 0.5985,
    "efa_dedup": 0.2236,
    "efa_latency_us": 1464,
    "tensor_exposed": 0.8978,
    "tensor_hidden": 0.4455,
    "expert_hidden": 0.8776,
    "context_exposed": 0.2646,
    "data_exposed": 0.2619,
    "contention": 0.3574,
    "stage_exposed": 0.2029,
    "fsdp2": 1.337,
    "deepspeed": 1.199,
    "jax": 0.9626,
    "year": 0.1104,
    "step_ms": 11.58,
}
# Measured over predicted step times: the tenth and the ninetieth percentile of runs left out.
INTERVALS: dict[str, tuple[float, float]] = {
    "dense": (0.845, 1.141),
    "mixture": (0.849, 1.269),
}
