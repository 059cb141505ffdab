"""The planner's constants: which share of a nominal figure a real run gets.

Every number here has a name, a meaning, a prior (what microbenchmarks and data sheets suggest, with its uncertainty)
and a value fitted to published runs by `plan/published/fit.py`, which keeps it near its prior unless many runs
disagree. The table is short on purpose: constants describe machines and frameworks, never single runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from moefold.plan.timing.fitted import FITTED


@dataclass(frozen=True)
class Meaning:
    """A constant's prior and what it stands for. `spread` is the prior's standard deviation of its logarithm; no fit
    leaves `range`, outside of which it would stand for something else."""

    name: str
    prior: float
    spread: float
    range: tuple[float, float]
    text: str


MEANINGS: tuple[Meaning, ...] = (
    # ---- arithmetic ----
    Meaning(
        "gemm_bf16", 0.80, 0.12, (0.6, 0.86), "share of the bf16 peak in large matmuls, at H100's watts per FLOP/s"
    ),
    Meaning("gemm_fp8", 0.82, 0.15, (0.6, 0.86), "the same for 8-bit matmuls and the 8-bit peak"),
    Meaning("gemm_fp4", 1.10, 0.3, (0.9, 1.35), "the same for 4-bit matmuls and the 4-bit peak"),
    # Its prior comes from no microbenchmark: it was chosen on the published NVFP4 runs on GB300.
    Meaning("fp4_sm103", 0.8, 0.15, (0.65, 1), "share of the 4-bit peak of B300-class GPUs against B200-class ones"),
    Meaning("gemm_sm80", 0.9, 0.1, (0.8, 0.95), "sustained share of A100-class GPUs against H100-class ones"),
    Meaning("gemm_sm100", 0.7, 0.15, (0.5, 0.85), "the same for B200-class GPUs (0.61-0.82 in microbenchmarks)"),
    Meaning("gemm_sm103", 0.75, 0.15, (0.5, 0.95), "the same for B300-class GPUs"),
    Meaning(
        "narrow_sm100",
        1.15,
        0.1,
        (1, 1.3),
        "8-bit over bf16 matmuls on B200-class GPUs, against the same on H100-class",
    ),
    Meaning(
        "power", 0.5, 0.3, (0.25, 0.9), "how a chip's rate falls with its watts: (FLOP/s per watt over usual) ** -power"
    ),
    Meaning("grouped", 0.92, 0.12, (0.75, 1), "grouped GEMMs of experts against one matmul of equal arithmetic"),
    Meaning(
        "attention_forward",
        0.55,
        0.12,
        (0.45, 0.65),
        "share of the bf16 peak in causal attention at 4k tokens (cuDNN: 0.55)",
    ),
    Meaning("attention_backward", 0.40, 0.12, (0.33, 0.48), "the same backward (cuDNN: 0.43-0.44)"),
    Meaning(
        "attention_long",
        0.11,
        0.4,
        (0.03, 0.2),
        "gain of attention per doubling of the length seen beyond 4k, up to 16k",
    ),
    Meaning("attention_sm103", 1.25, 0.15, (1, 1.6), "attention of B300-class GPUs against B200-class ones"),
    Meaning(
        "attention_narrow", 0.6, 0.25, (0.3, 1), "how attention's rate falls for heads below 128: (dim / 128) ** this"
    ),
    Meaning(
        "flash2", 0.58, 0.12, (0.45, 0.75), "rate of flash attention 2 on H100 against cuDNN's (0.52 measured forward)"
    ),
    Meaning("scan", 0.2, 0.4, (0.05, 0.4), "share of the bf16 peak in chunked scans of recurrences"),
    # ---- memory traffic ----
    Meaning(
        "traffic", 0.40, 0.2, (0.19, 0.91), "share of memory bandwidth in norms, activations, permutations and losses"
    ),
    Meaning(
        "stream", 0.80, 0.1, (0.65, 0.95), "the same where long buffers pass: the optimizer's update, written scores"
    ),
    Meaning("quantise", 5.0, 0.25, (3, 8), "bytes moved to convert one element to a narrow format"),
    Meaning("quantise_fused", 2.5, 0.3, (1, 5), "the same where a norm or an activation converts what it writes"),
    Meaning("compiled", 0.75, 0.2, (0.5, 1.1), "traffic that is left after a compiler fused elementwise work"),
    # ---- host ----
    Meaning("launch_us", 40.0, 0.4, (10, 60), "host time per kernel, framework included, x86, in microseconds"),
    Meaning("loop_us", 10.0, 0.5, (3, 30), "host time per expert and matmul in loops that leave Python aside"),
    Meaning("launch_grace", 1.15, 0.2, (1, 1.5), "the same on Grace hosts, as a factor"),
    Meaning(
        "launch_overlap",
        1.3,
        0.25,
        (1, 2.5),
        "host time per kernel, as a factor, where two microbatches take turns layer by layer to hide exchanges",
    ),
    Meaning("gap_us", 1.0, 0.3, (0.5, 3), "device time lost between two kernels"),
    Meaning(
        "sync_us",
        150.0,
        0.5,
        (50, 500),
        "idle time per forward pass of an MoE layer whose row counts the host must know",
    ),
    # ---- links ----
    Meaning("ring_link", 0.70, 0.15, (0.6, 0.9), "share of fast links in gathers and scatters"),
    Meaning("ring_nic", 0.78, 0.05, (0.65, 0.92), "share of the network in gathers and scatters"),
    Meaning(
        "exchange_link", 0.62, 0.15, (0.55, 0.72), "share of fast links in a plain all-to-all (0.55-0.72 measured)"
    ),
    Meaning("exchange_nic", 0.80, 0.15, (0.8, 0.95), "share of the network in a plain all-to-all (0.81-0.9 measured)"),
    Meaning(
        "dedup_link", 0.75, 0.15, (0.72, 0.9), "share of fast links in deduplicating dispatchers (0.72-0.9 measured)"
    ),
    Meaning("dedup_nic", 0.95, 0.2, (0.8, 1.1), "share of the network in deduplicating dispatchers (0.8-1.1 measured)"),
    Meaning("latency_us", 50.0, 0.4, (10, 120), "fixed time of one collective"),
    Meaning("efa", 0.35, 0.8, (0.1, 1), "share of an EFA network's rate against InfiniBand's"),
    Meaning("efa_dedup", 0.35, 0.8, (0.1, 1), "the same for deduplicating dispatchers"),
    Meaning("efa_latency_us", 500.0, 1.0, (100, 3000), "fixed time of a collective over EFA"),
    # ---- overlap ----
    Meaning(
        "tensor_exposed", 0.75, 0.25, (0.4, 1), "tensor-parallel collectives left exposed where nothing overlaps them"
    ),
    Meaning("tensor_hidden", 0.35, 0.3, (0.1, 0.7), "the same where they run beside matmuls"),
    Meaning(
        "expert_hidden",
        0.85,
        0.06,
        (0.7, 0.97),
        "share of dispatch and combine hidden by overlapping with another microbatch",
    ),
    Meaning("context_exposed", 0.25, 0.5, (0.05, 0.7), "share of context-parallel communication left exposed"),
    Meaning("data_exposed", 0.25, 0.4, (0.05, 0.6), "gradient reduction and parameter gathering left exposed"),
    Meaning("contention", 0.15, 0.5, (0.03, 0.4), "compute time lost per hidden second of communication"),
    Meaning("stage_exposed", 0.30, 0.5, (0.05, 1), "messages between stages left exposed"),
    # ---- frameworks ----
    Meaning("fsdp2", 1.05, 0.1, (0.9, 1.3), "compute time with FSDP2 against Megatron's"),
    Meaning(
        "ring_fsdp2", 0.10, 0.5, (0.02, 0.4), "growth of attention's time per doubling of the context ranks, with FSDP2"
    ),
    Meaning("deepspeed", 1.10, 0.1, (0.9, 1.4), "the same for Megatron-DeepSpeed of 2023"),
    Meaning("jax", 1.05, 0.1, (0.85, 1.3), "the same for JAX"),
    Meaning("year", 0.05, 0.4, (0.001, 0.15), "share of compute and host time that frameworks lose per year"),
    Meaning("step_ms", 30.0, 0.7, (3, 100), "fixed time of a step: clipping, logging, the optimizer's launches"),
)


@dataclass(frozen=True)
class Constants:
    """All values by name."""

    values: tuple[float, ...]

    def __getattr__(self, name: str) -> float:
        if name not in _INDEX:
            raise AttributeError(name)
        # An attribute from now on, for a search asks for each a hundred thousand times.
        value = self.__dict__[name] = self.values[_INDEX[name]]
        return value


_INDEX = {meaning.name: index for index, meaning in enumerate(MEANINGS)}
PRIORS = Constants(tuple(meaning.prior for meaning in MEANINGS))
CURRENT = Constants(tuple(FITTED.get(meaning.name, meaning.prior) for meaning in MEANINGS))
