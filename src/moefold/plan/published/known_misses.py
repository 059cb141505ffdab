"""Runs with a large prediction error, and what their records do not say or the planner does not model.

Prefixes of ids, so that one line covers a sweep. Nothing here changes a prediction: it is text for the page of errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_REASONS = {
    "aws-": "EFA with a proxy per message: its cost per message is known from two models only",
    "automodel-dsv3": "what is recomputed is stated as `activation checkpointing`; the planner repeats whole layers",
    "automodel-nemosuper": "a hybrid model under FSDP2 on H100, the only run of its kind",
    "dgxc-v25.05.05-dsv3-GB200": "an early GB200 release, as slow as if expert exchanges left NVLink",
    "dgxc-v25.05.05-grok1": "expert tensor parallelism of 4 whose exchanges the planner takes for exposed",
    "dgxc-v25.05.05-nemotron340b": "a tuned dense run; whether its gathers overlap is not stated",
    "folding-t3-llama3_8x70b-FSDP": "microbatch size not stated; gathering parameters less often makes it faster",
    "folding-": "microbatch and virtual stages not stated; the planner assumes 1, and one layer per virtual stage",
    "mb-25.11-pretrain-qwen3_30b-H100": "24 virtual stages of one layer; host time per stage is not in the planner",
    "mb-26.02.01-pretrain-qwen3_30b-H100": "the same run one release earlier took 1.7 times as long; flags not stated",
    "mb-26.06.01-pretrain-gpt_oss": "same flags as a run that is twice as fast in the next release",
    "mbcard-gpt-oss": "neither the dispatcher nor graphs are stated",
    "mbskill-moonlight": "one microbatch of 4,096 tokens per step: fixed costs the planner spreads too thin",
    "primus-": "the only AMD run; nothing was fitted to it, and its attention is sparse in a way that is not modelled",
    "titan-nvfp4": "torchtitan of 2026 at four GPUs; other torchtitan runs of the collection are slower per FLOP",
    "titan-b200": "torchtitan of 2025 with one sequence per step",
    "titan-t2": "torchtitan's first ring attention slows down with each doubling of the ring, Megatron's does not",
    "titan-": "frameworks on FSDP2 differ among themselves by more than the one factor they have here",
    "vtrain": "a cluster with half the usual network; which traffic shares it is not stated",
    "zoo-qwen235-h100-fsdp": "Megatron-FSDP; the planner gathers experts for every microbatch at 0.7 of the network",
    "report-t11-deepseek_v3-GB200-bf16": "its layout differs between two tables of the same report",
}  # fmt: skip
REASONS: Mapping[str, str] = MappingProxyType(_REASONS)


def reason_for(id: str) -> str:
    """The longest prefix that fits."""
    fitting = [prefix for prefix in REASONS if id.startswith(prefix)]
    return REASONS[max(fitting, key=len)] if fitting else "not understood"
