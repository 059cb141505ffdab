"""How a run computes: the formats of its numbers, and which implementation runs experts and what lies between matmuls.

Formats change results; implementations change them by rounding only.

Some values are planned only: other frameworks have them, `moefold plan` predicts them, and `checks/planned_only.py`
refuses to train them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from moefold.config.precision_recipes import DispatchFormat, DownInput, RecipeName, TpReduceFormat
from moefold.config.strict import STRICT

Format = Literal["float64", "float32", "bfloat16"]
FORMATS: tuple[Format, ...] = get_args(Format)
# Planned only, for what is kept: weights, gradients, master weights and moments.
KeptFormat = Literal[Format, "float16", "float8"]
# Of activations and matmuls, under a loss scale where it is float16. Narrower operands of matmuls are a recipe.
ComputeFormat = Literal[Format, "float16"]
COMPUTE_FORMATS: tuple[ComputeFormat, ...] = (*FORMATS, "float16")
GatherFormat = Literal[ComputeFormat, "narrow"]
# Of a history of amaxes: its largest one, or that of the last step.
AmaxComputeAlgo = Literal["max", "most_recent"]
# The format of master weights; remainder: the bfloat16 weight is their upper half, and 16 bits the lower half.
MasterFormat = Literal[KeptFormat, "remainder"]
BYTES: dict[MasterFormat, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "remainder": 2,
}

# Those that run experts; `auto` stands for one of them, chosen by device and format (`checks/kernels.py`).
NamedExperts = Literal["sequential", "grouped", "fused", "deepgemm", "mxfp8", "transformer_engine"]
ExpertBackend = Literal["auto", NamedExperts]
KernelBackend = Literal["torch", "triton", "native"]
RowPadding = Literal["wgrad", "permute", "routing_map"]
CastBackend = Literal["torch", "native", "triton"]
LinearBackend = Literal["torch", "transformer_engine"]
NarrowGemmBackend = Literal["emulated", "scaled_mm", "transformer_engine"]
PermuteBackend = Literal["backend", "transformer_engine"]
AttentionBackend = Literal[
    "auto", "sdpa", "triton", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flex", "reference"
]
Graphs = Literal["none", "partial", "full"]
# Megatron's words for parts of a layer (`cuda_graph_scope`).
GraphScope = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]
CpuMatmul = Literal["auto", "compute", "float32"]
Compile = Literal["none", "regions"]


@dataclass(frozen=True)
class LossScaleConfig:
    """The loss scale of float16: a number that the loss is multiplied by, and gradients are divided by again.

    float16 has no numbers between 0 and 6e-8, where many gradients of activations lie. The backward pass is linear in
    the loss, so a scaled loss moves all of them up, and 65,504, the largest float16, bounds the scale from above. A
    dynamic scale is searched for while training, by Megatron's rule (`precision/loss_scaling.py`). Names and defaults
    are Megatron's; its factors, 2 and 1/2, are not options there either.
    """

    __pydantic_config__: ClassVar = STRICT

    # dynamic; or one number for all steps, such as 4096 (Megatron's loss-scale). Powers of two are exact; 1: none.
    scale: Literal["dynamic"] | float = "dynamic"
    # The first value of a dynamic scale (initial-loss-scale).
    initial: float = 2.0**32
    # Its smallest value (min-loss-scale).
    min: float = 1.0
    # After this many finite steps without an overflow between them, the scale doubles (loss-scale-window).
    window: int = 1000
    # The scale is halved at an overflow from this many on since it last doubled. 1, as torch.amp.GradScaler: at every
    # one.
    hysteresis: int = 2


@dataclass(frozen=True)
class PrecisionConfig:
    """Parameters and gradients are in `params`, activations and matmuls in `compute`; messages as named below."""

    __pydantic_config__: ClassVar = STRICT

    # Planned only: float16, float8.
    params: KeptFormat = "float32"
    # float16 has a loss scale, and parameters of float32.
    compute: ComputeFormat = "float32"
    # How the operands of matmuls are narrowed (`config/precision_recipes.py`); None: not at all, they are in `compute`.
    recipe: RecipeName | None = None
    # The cast of what enters down projections in fprop: the recipe's, or per_token: E4M3 with a scale per token.
    down_input: DownInput = "recipe"
    # Modules whose matmuls stay in `compute`, by shell patterns of their names, such as layers.0.* or *.attention.out.
    # Routers, the embedding, the head, norms and attention itself always do.
    wide: tuple[str, ...] = ("*.shared_gate",)
    # Of `recipe: fp8_delayed`: of how many steps amaxes are kept. This and max are Transformer Engine's defaults: a
    # tensor that was large lately does not saturate when it is so again. Megatron's are 1 and most_recent.
    amax_history_len: int = 1024
    # Which of them decides a scale.
    amax_compute_algo: AmaxComputeAlgo = "max"
    # Planned only, unless None: the format of gradients; None is the format of `params`.
    gradients: KeptFormat | None = None
    # Master weights; None is none, because `params` are their own masters.
    master: MasterFormat | None = None
    # The optimizer's moments; None is the format of `params`.
    moments: KeptFormat | None = None
    # Of moments that are narrower than float32. Nearest rounding loses small changes of the second moment where
    # 1 - beta2 < 2**-8.
    moments_rounding: Literal["nearest", "stochastic"] = "nearest"
    # The all-gather of parameters over data-parallel ranks, except routers', which compute in float32. None: the
    # narrower of `params` and `compute`. A weight is cast to `compute` where it is used, so casting it before it is
    # sent changes no value. narrow: weights that `recipe` narrows are sent and held whole as codes of one byte, under
    # scales of whole blocks; other parameters as with None.
    gather: GatherFormat | None = None
    # Sums of gradients over data-parallel ranks. None: `params`, or float32 if that is narrower. bfloat16 rounds each
    # partial sum, and sends half the bytes. bfloat16_all_to_all: each part is rounded and sent to the rank that owns
    # its sum, and summed there in float32.
    reduce: Literal[Format, "bfloat16_all_to_all"] | None = None
    # Sums of activations and of their gradients over tensor-parallel ranks. None: `compute`, or float32 if that is
    # narrower. bfloat16 rounds each partial sum, and sends half the bytes. fp8_all_to_all: parts are sent in FP8 to the
    # rank that owns their sum, and summed there in float32 (`config/precision_recipes.py`).
    tp_reduce: Literal[Format, TpReduceFormat] | None = None
    # Rows on their way to experts, in dispatch and in combine's backward: codes and scales. What comes back is in
    # `compute`. None: as rows are.
    dispatch: DispatchFormat | None = None
    # Of float16 (`LossScaleConfig`). None: a dynamic one with its defaults; other formats have none.
    loss_scale: LossScaleConfig | None = None

    @property
    def gather_format(self) -> KeptFormat:
        """Of parameters that are gathered wide."""
        if self.gather is not None and self.gather != "narrow":
            return self.gather
        return self.compute if BYTES[self.compute] < BYTES[self.params] else self.params

    @property
    def loss_scaling(self) -> LossScaleConfig | None:
        """None where the loss is not scaled."""
        return (self.loss_scale or LossScaleConfig()) if self.compute == "float16" else None

    @property
    def reduce_format(self) -> KeptFormat:
        """Of sums; parts of them may be sent in a narrower one."""
        if self.reduce == "bfloat16_all_to_all":
            return "float32"
        return self.reduce or (self.params if BYTES[self.params] >= 4 else "float32")

    @property
    def tp_reduce_format(self) -> Format:
        """Of sums; parts of them may be sent in a narrower one."""
        if self.tp_reduce == "fp8_all_to_all":
            return "float32"
        return self.tp_reduce or ("float64" if self.compute == "float64" else "float32")


@dataclass(frozen=True)
class KernelsConfig:
    """Backends by name; one that cannot run on the machine is refused at the start, never replaced."""

    __pydantic_config__: ClassVar = STRICT

    # sequential: one matmul per expert, the reference. grouped: one grouped GEMM for all experts of the rank, for GPUs.
    # fused: permute, both matmuls, activation and combine as one operation, for CPUs. deepgemm, mxfp8,
    # transformer_engine: grouped GEMMs of other libraries, for GPUs: docs/engines.md. auto: sequential, grouped or
    # fused by device and compute format, said by `moefold check` and by the first line of a run.
    experts: ExpertBackend = "grouped"
    # Operations between matmuls. torch: torch's own, on any device. triton: one kernel per operation, on GPUs.
    # native: for CPUs; torch's, with the activation in C, compiled on first use.
    backend: KernelBackend = "torch"
    # Permuting rows around grouped GEMMs: as `backend` does it, or by Transformer Engine, on GPUs: docs/engines.md.
    permute: PermuteBackend = "backend"
    # Attention over packed documents. sdpa: torch's fused attention, a call per shape of document. triton: our kernels,
    # one launch forward and three backward. flash_attn_*: that version of the flash-attn package. flex: torch's
    # flex_attention, compiled. reference: all scores in memory. auto: triton where backend is triton, else sdpa.
    attention: AttentionBackend = "auto"
    # Casts of `precision.recipe`. torch: the reference, on any device. native: one pass in C, for CPUs.
    # triton: one kernel per cast, on GPUs, with kernels.backend triton.
    casts: CastBackend = "torch"
    # Matmuls of `precision.recipe`. emulated: narrowed values are multiplied as wider numbers, on any device.
    # scaled_mm: torch's GEMMs of codes and scales; on CPUs with scales of tensors or rows alone. transformer_engine:
    # its GEMMs, on GPUs: docs/engines.md.
    narrow_gemm: NarrowGemmBackend = "emulated"
    # Where rows of experts are padded with zeros to the alignment of `precision.recipe`. wgrad: in the operands of
    # weight gradients alone. permute: the permutation makes the rows, for all matmuls. routing_map: every rank routes
    # tokens of zeros, so that it sends each expert an aligned number of rows (Megatron's
    # moe_router_padding_for_quantization).
    row_padding: RowPadding = "wgrad"
    # Matmuls of linear layers: torch's, or Transformer Engine's GEMM, in bfloat16 on GPUs: docs/engines.md.
    linear: LinearBackend = "torch"
    # Matmuls of 16-bit numbers on CPUs. compute: in their own format. float32: widened, and the product rounded, which
    # differs in the order of sums alone. auto: float32 on a CPU without instructions for the format, where its matmuls
    # take several times as long; the first line of a run says which.
    cpu_matmul: CpuMatmul = "auto"
    # CUDA graphs (docs/graphs.md). partial: the parts of layers that `graph_scope` names. Planned only: full, the whole
    # step.
    graphs: Graphs = "none"
    # attn: attention and its norm. moe_router: the other norm, scores, top-k, probs and balance losses. moe: what lies
    # between the exchanges of an MoE layer. mlp: the feed-forward of a dense layer. Planned only: moe_preprocess and
    # mamba.
    graph_scope: tuple[GraphScope, ...] = ("attn", "moe_router")
    # torch.compile. regions: of an MoE layer, what lies between its exchanges: scores to probs, balance losses, the
    # order in which rows are sent, the experts' activation; each is one graph, and a graph break is an error.
    compile: Compile = "none"
