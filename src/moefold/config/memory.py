"""What a run keeps of its activations and states, where, and what it computes again instead.

The steps of a block that can be retained in other ways than kept, each with what its consumers save of it:

    attention_norm   the norm before attention
    latent_norm      the norms of MLA's latents
    mla_up           queries, keys and values of MLA, from their latents
    core             the attention kernel's output
    feed_norm        the norm before the feed-forward
    rows             rows that the experts of this rank received
    gate_up          the experts' first GEMM
    activation       the experts' gated activation
    shared           the shared expert
    dense            the dense feed-forward
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from moefold.config.strict import STRICT

RecomputedPhase = Literal["attention", "feed_forward", "experts"]
# Planned only: parts of a phase, and whole layers.
RecomputedPart = Literal["full", "core_attention", "mla_up", "norms", "activation"]
Recomputed = Literal[RecomputedPhase, RecomputedPart]
# Activations that a framework can keep in the host's memory, by Megatron's names of the modules that save them.
OffloadedActivation = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"
]
RetainedStep = Literal[
    "attention_norm",
    "latent_norm",
    "mla_up",
    "core",
    "feed_norm",
    "rows",
    "gate_up",
    "activation",
    "shared",
    "dense",
]
# discard: recomputed in the backward pass. offload: waits in the host's memory. quantize: narrow matmuls keep their
# input in the format in which their weight gradient reads it (docs/precision.md); of attention_norm, latent_norm, rows,
# activation, shared, dense, and feed_norm of dense layers. page: of buffers of a fixed size the rows that are there, in
# pages of a pool (docs/memory.md); of rows, gate_up, activation.
Retention = Literal["keep", "discard", "offload", "quantize", "page"]
RetainPreset = Literal["none", "megascale_sar", "fine_grained", "fine_grained_offload"]

# Published choices, as far as steps can say them.
PRESETS: Mapping[RetainPreset, Mapping[RetainedStep, Retention]] = {
    "none": {},
    # MegaScale-MoE's selective activation rematerialisation: outputs of matmuls are kept, norms and the activation are
    # recomputed. It also repeats the all-gather of rows, which this trainer does not.
    "megascale_sar": {"attention_norm": "discard", "feed_norm": "discard", "activation": "discard"},
    # Megatron Core's fine-grained recomputation for DeepSeek-V3: norms, MLA's up-projections, the experts' activation.
    "fine_grained": {
        "attention_norm": "discard",
        "latent_norm": "discard",
        "mla_up": "discard",
        "feed_norm": "discard",
        "activation": "discard",
    },
    # The same with its offloading: the activation is recomputed, and its input waits in the host's memory.
    "fine_grained_offload": {
        "attention_norm": "discard",
        "latent_norm": "discard",
        "mla_up": "discard",
        "feed_norm": "discard",
        "gate_up": "offload",
        "activation": "discard",
    },
}


@dataclass(frozen=True)
class RetainConfig:
    """Per step of a block: what happens to the output that its consumers save for the backward pass. None: what
    ``memory.preset`` says."""

    __pydantic_config__: ClassVar = STRICT

    attention_norm: Retention | None = None
    latent_norm: Retention | None = None
    mla_up: Retention | None = None
    core: Retention | None = None
    feed_norm: Retention | None = None
    rows: Retention | None = None
    gate_up: Retention | None = None
    activation: Retention | None = None
    shared: Retention | None = None
    dense: Retention | None = None


@dataclass(frozen=True)
class MemoryConfig:
    """A recomputed phase keeps only its input and runs its forward again in backward; no collective runs twice."""

    __pydantic_config__: ClassVar = STRICT

    # Planned only: full, core_attention, mla_up, norms, activation.
    recompute: tuple[Recomputed, ...] = ()
    # Finer than phases: single steps of a block, by a published choice and one by one; the latter wins.
    preset: RetainPreset = "none"
    retain: RetainConfig = field(default_factory=RetainConfig)
    # Bound of the host memory for offloaded activations, in GiB per rank; None: no bound. What does not fit is kept.
    host_gib: float | None = None
    # Rows for which there are pages (`retain.STEP: page`), over those of an even routing, summed over layers and
    # microbatches in flight; and which share of the pages is in the host's memory, on CPUs.
    page_bound: float = 1.1
    page_spill: float = 0.0
    # Rows of a page.
    page_rows: int = 64
    # Planned only: activations by Megatron's names, and all activations of so many layers per pipeline rank, that wait
    # in the host's memory.
    offload: tuple[OffloadedActivation, ...] = ()
    offload_layers: int = 0
    # Where moments and remainders are between updates; whole main weights stay on the device. host: in the host's
    # memory, and copied to the device for the update. cpu: in the host's memory, and the update runs there.
    optimizer: Literal["device", "host", "cpu"] = "device"

    def retained(self) -> dict[RetainedStep, Retention]:
        """What happens to each step, with the preset applied."""
        preset = PRESETS[self.preset]
        return {step: getattr(self.retain, step) or preset.get(step, "keep") for step in get_args(RetainedStep)}
