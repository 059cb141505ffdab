"""A workload: everything a prediction depends on. It is a run, the cluster it runs on, and the framework that runs it.

The run is the trainer's own `RunConfig`, whether it is to be trained here or was published by somebody else
(`plan/published/records.py`). What other frameworks can do and moefold cannot are values of the same keys, which
`checks/planned_only.py` refuses to train. `Framework` holds what no configuration key says: whose code it is, how old,
and what that code does by itself. Everything else here follows from those three and is computed when it is asked for.

Published models also have layers that `ModelConfig` cannot describe (recurrences, layers without a feed-forward part,
ungated activations). Only for those a workload has a `shape` of its own beside the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal, cast, get_args

from moefold.blueprint.model_shape import ModelShape, shape_of
from moefold.blueprint.narrow_bytes import casts_of
from moefold.blueprint.narrow_matmuls import gather_casts
from moefold.blueprint.parameters import parameters
from moefold.blueprint.row_bounds import RowBounds, bounds_rows, row_bounds
from moefold.config.memory import Recomputed, RetainConfig, RetainedStep, Retention
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import BYTES, PrecisionConfig
from moefold.config.precision_recipes import PRECISION_RECIPES, LinearCasts, NarrowRecipe
from moefold.config.run import RunConfig
from moefold.errors import LayoutError, Problem
from moefold.hardware.cluster import Cluster
from moefold.plan.clone_loads import Cloned, EchoSizes, cloned
from moefold.plan.dispatch_choice import PlannedDispatcher, planned_as
from moefold.plan.framework_rules import FrameworkName
from moefold.schedule.names import schedule_named
from moefold.topology.folded_layout import fold

# Formats of matmuls that have rates and sizes of their own: those without scales, or a recipe.
WideFormat = Literal["bfloat16", "float16", "float32"]
PlannedFormat = Literal[WideFormat, NarrowRecipe]
WIDE_FORMATS: tuple[PlannedFormat, ...] = get_args(WideFormat)
Dispatcher = Literal["local", PlannedDispatcher]
# cudnn: those of Transformer Engine, and of torch on GPUs since H100 (`scaled_dot_product_attention` prefers them since
# 2.13). flash2: the second version of flash attention, as torch called it there before. unfused: matmuls and a softmax.
AttentionKernels = Literal["cudnn", "flash2", "unfused"]
# As Megatron trains: 16-bit weights, and gradients, master weights and moments in float32.
MEGATRON_PRECISION = PrecisionConfig("bfloat16", "bfloat16", gradients="float32", master="float32", moments="float32")
_ALL_KEPT = RetainConfig()
# Moments in float8 have an exponent of one byte per block of so many values.
MOMENT_SCALE, MOMENT_BLOCK = 1, 128


@dataclass(frozen=True)
class Framework:
    """Who runs the work, and what that code does that no configuration key says."""

    name: FrameworkName = "moefold"
    # The release whose rules hold (`plan/framework_rules.py`); "": those of all releases that were read.
    release: str = ""
    # The year and month of the framework, as a float (2025.5); kernels get better with time. 0 is not known.
    date: float = 0.0
    # torch.compile or another compiler fuses elementwise work.
    compiled: bool = False
    # Attention's kernels. All but the last save no scores: they compute them again block by block.
    attention: AttentionKernels = "cudnn"
    # Loss and gradient are written over the logits; else each pass makes its own copies.
    fused_loss: bool = True
    # Dropout keeps a mask.
    dropout: bool = False
    # Between matrices that tensor parallelism cuts, tokens are cut instead (else every rank keeps all of them).
    sequence_parallel: bool = True
    tp_overlap: bool = False
    gradient_overlap: bool = True
    # Rows of experts are kept in a pool of pages, so that graphs need no copies.
    paged_stash: bool = False
    # Both matmuls of experts and what is between them are two kernels.
    fused_experts: bool = False
    # Scores, top-k and the auxiliary loss are three kernels forward.
    fused_router: bool = False


@dataclass(frozen=True)
class Rescaling:
    """What a measured run makes of a predicted step (`plan/timing/anchoring.py`): the factor of its time, and the 80 %
    interval of measured steps over the rescaled prediction."""

    factor: float
    low: float
    high: float


@dataclass(frozen=True)
class Workload:
    run: RunConfig
    cluster: Cluster
    framework: Framework = field(default_factory=Framework)
    # Rows of the busiest rank over the mean; forced balance is 1. Only a router that is running could tell.
    imbalance: float = 1.0
    # The model, where `run.model` cannot describe it (see above); None elsewhere.
    shape: ModelShape | None = None
    # By a run that was measured; None: predictions are those of the fitted constants.
    rescaling: Rescaling | None = None

    # ---- the model and the ranks ----

    @cached_property
    def model(self) -> ModelShape:
        return self.shape or shape_of(self.run.model)

    @property
    def parallel(self) -> ParallelConfig:
        return self.run.parallel

    @cached_property
    def dp(self) -> int:
        parallel = self.run.parallel
        return max(1, self.cluster.num_gpus // (parallel.tp * parallel.cp * parallel.pp))

    @cached_property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        parallel = self.run.parallel
        return max(1, parallel.tp * parallel.cp * self.dp // (parallel.ep * parallel.etp))

    # ---- the batch ----

    @cached_property
    def tokens(self) -> int:
        """Of one microbatch, before context or tensor parallelism cut it."""
        return self.run.data.seq_len * self.run.data.micro_batch

    @cached_property
    def microbatches(self) -> int:
        """Packed documents fill microbatches of this size about as often as whole sequences."""
        data = self.run.data
        return max(1, round(data.global_batch / (data.micro_batch * self.dp)))

    @cached_property
    def context_tokens(self) -> float:
        """Of one microbatch, after context parallelism cut it."""
        return self.tokens / self.run.parallel.cp

    @cached_property
    def local_tokens(self) -> float:
        """Of one microbatch, after context and tensor (sequence) parallelism cut it."""
        return self.context_tokens / self.run.parallel.tp

    @cached_property
    def global_tokens(self) -> float:
        return float(self.tokens * self.microbatches * self.dp)

    @cached_property
    def clones(self) -> Cloned:
        """What clones of hot experts (`parallel.echo`) leave of the imbalance, and how many there are."""
        moe, parallel = self.run.model.moe, self.run.parallel
        if moe is None or parallel.echo is None or not self.is_own:
            return Cloned(self.imbalance, 0, 0)
        rows = self.local_tokens * moe.top_k * parallel.etp
        sizes = EchoSizes(moe.num_experts, parallel.ep, parallel.echo.slots)
        return cloned(sizes, self.imbalance, round(parallel.echo.min_rows / rows, 6))

    @property
    def busiest(self) -> float:
        """Rows that the busiest rank computes over the mean."""
        return self.clones.busiest

    @cached_property
    def row_padding(self) -> float:
        """Rows of experts with their rows of zeros (`kernels.row_padding`), over those that were routed.

        A run of rows is padded to a multiple, by (multiple - 1) / 2 on average: a run of each expert, or with
        routing_map one of each expert on every rank that sends to it. Padding in weight gradients alone is not kept.
        """
        recipe, moe, kind = self.run.precision.recipe, self.run.model.moe, self.run.kernels.row_padding
        if recipe is None or moe is None or kind == "wgrad" or not self.is_own:
            return 1.0
        sources = self.parallel.ep * self.parallel.etp if kind == "permute" else 1
        run = self.local_tokens * moe.top_k * sources / moe.num_experts
        return 1 + (PRECISION_RECIPES[recipe].align - 1) / 2 / max(run, 1.0)

    @cached_property
    def row_buffer(self) -> float:
        """Rows of the experts' buffers over the mean of a rank: those of the busiest one, or of a bound."""
        bounds = self._row_bounds
        if bounds is None:
            return self.busiest
        return bounds.rank * self.parallel.exchange_chunks / (self._mean_rows * self.parallel.etp)

    @cached_property
    def sent_rows(self) -> float:
        """Rows of a rank's messages to experts over its assignments, where their number is fixed."""
        bounds = self._row_bounds
        if bounds is None:
            return 1.0
        return bounds.pair * self.parallel.exchange_chunks * self.parallel.ep / self._mean_rows

    @property
    def _mean_rows(self) -> float:
        assert self.run.model.moe is not None
        return max(1.0, self.local_tokens * self.run.model.moe.top_k)

    @property
    def _row_bounds(self) -> RowBounds | None:
        sent = self.parallel.ep * self.parallel.etp > 1
        return row_bounds(self.run, int(self.local_tokens)) if bounds_rows(self.run) and sent else None

    # ---- formats, and bytes of what is kept ----

    @cached_property
    def format(self) -> PlannedFormat:
        """Of matmuls; float64, which proofs compute in, is planned as float32."""
        recipe, compute = self.run.precision.recipe, self.run.precision.compute
        if recipe is not None:
            return "bfloat16" if recipe == "bf16" else recipe
        return "float32" if compute == "float64" else compute

    @cached_property
    def casts(self) -> LinearCasts | None:
        """Of the operands of matmuls; None: they are words."""
        return casts_of(self.run.precision.recipe)

    @cached_property
    def word(self) -> float:
        """Bytes of an element wherever it is not narrow: as it travels, and between matmuls."""
        return float(min(4, BYTES[self.run.precision.compute]))

    @cached_property
    def is_flat(self) -> bool:
        """moefold's ZeRO-1: weights and gradients whole in flat buffers, main weights and moments sharded."""
        return self.is_own and self.run.parallel.sharding == "flat"

    @cached_property
    def weight_bytes(self) -> float:
        """Of a parameter as it is held at rest."""
        narrow = self.is_flat or (self.is_own and not self._trains_weights)
        return self.gather_bytes if narrow else float(BYTES[self.run.precision.params])

    @cached_property
    def gather_bytes(self) -> float:
        """Of a parameter as moefold sends it and holds it whole: the mean, where some are codes with scales."""
        casts = gather_casts(self.run)
        if not casts:
            return self.wide_gather_bytes
        codes = sum(size * casts[name].bytes_per_value for name, size in self._sizes.items() if name in casts)
        return self.wide_gather_bytes * (1 - self._narrow_share) + codes / sum(self._sizes.values())

    @cached_property
    def wide_gather_bytes(self) -> float:
        """Of the embedding, the head and whatever else is not gathered as codes."""
        return float(BYTES[self.run.precision.gather_format])

    @cached_property
    def _narrow_share(self) -> float:
        """Of all parameters, those that are gathered as codes."""
        casts = gather_casts(self.run)
        return sum(self._sizes[name] for name in casts) / sum(self._sizes.values()) if casts else 0.0

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {spec.name: prod(spec.shape) for spec in parameters(self.run.model)}

    @cached_property
    def gradient_bytes(self) -> float:
        precision = self.run.precision
        if not self._trains_weights:
            return 0.0
        # Flat buffers add microbatches up in float32 whatever the parameters are.
        least = 4 if self.is_flat else 0
        return float(max(least, BYTES[precision.gradients or precision.params]))

    @cached_property
    def master_bytes(self) -> float:
        """0 where the weights themselves are the masters."""
        precision = self.run.precision
        master = precision.master
        if master is None and self.is_flat and precision.gather_format != precision.params:
            master = precision.params
        if not self._trains_weights:
            return 0.0
        wide = 0.0 if master is None else float(BYTES[master])
        if not self.is_flat or not self._narrow_share:
            return wide
        # Beside codes: a remainder with the bfloat16 weight that it completes, or masters.
        narrow = 4.0 if master == "remainder" else float(BYTES[master or precision.params])
        return wide * (1 - self._narrow_share) + narrow * self._narrow_share

    @cached_property
    def device_master_bytes(self) -> float:
        """Of main weights on the device. moefold sends moments and remainders to the host, and no whole weights."""
        stays = self.is_own and self.run.precision.master != "remainder"
        if stays or self.run.memory.optimizer == "device":
            return self.master_bytes
        return 2.0 * self._narrow_share if self.is_flat else 0.0

    @cached_property
    def moment_bytes(self) -> float:
        """Of one moment."""
        precision = self.run.precision
        if not self._trains_weights:
            return 0.0
        each = float(BYTES[precision.moments or precision.params])
        return each + MOMENT_SCALE / MOMENT_BLOCK if self.is_own and precision.moments == "float8" else each

    @cached_property
    def moments_bytes(self) -> float:
        """Of both moments together."""
        return 2.0 * self.moment_bytes

    @property
    def _trains_weights(self) -> bool:
        return self.run.optim.trained == "all"

    # ---- how the run does its work ----

    @cached_property
    def is_own(self) -> bool:
        """moefold runs it: its rules, its rows of saved tensors, its schedules."""
        return self.framework.name == "moefold"

    @cached_property
    def dispatcher(self) -> Dispatcher:
        """Adaptive is the one that it comes to, a variant the one whose formulas it shares."""
        spread = self.model.is_moe and self.run.parallel.ep * self.run.parallel.etp > 1
        return planned_as(self.run) if spread else "local"

    @cached_property
    def ep_overlap(self) -> bool:
        """Dispatch and combine of one microbatch overlap with the computation of another."""
        return schedule_named(self.run.parallel.schedule).overlaps or "ep" in self.run.parallel.overlap

    @cached_property
    def delay_wgrad(self) -> bool:
        """Weight gradients are deferred to fill the waits."""
        return schedule_named(self.run.parallel.schedule).splits_backward or "wgrad" in self.run.parallel.overlap

    @cached_property
    def recompute(self) -> frozenset[Recomputed]:
        return frozenset(self.run.memory.recompute)

    @cached_property
    def repeated_matmuls(self) -> Literal["", "second", "all"]:
        """Which plain matmuls torchtitan's operator-wise recomputation runs again; "" where there is none. It lists
        what it keeps by name, and formats that torch has no matmul for are not on the list."""
        if self.framework.name != "fsdp2" or not self.recompute >= {"norms", "activation"}:
            return ""
        return "all" if self.format == "nvfp4" else "second"

    @cached_property
    def _retained(self) -> Mapping[Retention, frozenset[RetainedStep]]:
        """Steps of `memory.retain` by what is done with them; other frameworks have other names for theirs."""
        memory, found = self.run.memory, dict[Retention, frozenset[RetainedStep]]()
        if self.is_own and (memory.preset != "none" or memory.retain != _ALL_KEPT):
            for step, how in memory.retained().items():
                found[how] = found.get(how, frozenset()) | {step}
        return found

    def retained(self, how: Retention) -> frozenset[RetainedStep]:
        """Steps of a block that are kept, discarded or offloaded."""
        return self._retained.get(how, frozenset())

    @cached_property
    def drops(self) -> bool:
        """Tokens over capacity are dropped, so no rank gets more than its share."""
        moe = self.run.model.moe
        return moe is not None and moe.capacity is not None

    @cached_property
    def weighted_inside(self) -> bool:
        """The prob is applied inside the experts' activation, so that their outputs need not be saved."""
        moe = self.run.model.moe
        return moe is None or moe.weight_at == "activation"


def workload_of_run(run: RunConfig, cluster: Cluster, imbalance: float = 1.0) -> Workload:
    """This run on this cluster, as moefold runs it; LayoutError where grids or batch do not divide over its ranks."""
    dp, data = fold(run.parallel, cluster.num_gpus).size("dp"), run.data
    one_round = data.micro_batch * dp
    if data.packing != "bin_packed" and data.global_batch % one_round:
        message = f"{data.global_batch} sequences do not divide over micro_batch * dp = {data.micro_batch} * {dp}"
        raise LayoutError(Problem("data.global_batch", message, f"use a multiple of {one_round}"))
    return Workload(run, cluster, imbalance=imbalance)


def in_format(precision: PrecisionConfig, format: PlannedFormat) -> PrecisionConfig:
    """With matmuls in this format. A recipe narrows words of 16 bits, unless the run has such words already."""
    if format in WIDE_FORMATS:
        return replace(precision, compute=cast(WideFormat, format), recipe=None)
    words = precision.compute if BYTES[precision.compute] == 2 else "bfloat16"
    return replace(precision, compute=words, recipe=cast(NarrowRecipe, format))


def changed(workload: Workload, **sections: Mapping[str, object]) -> Workload:
    """A copy in which keys of the run differ: `changed(workload, parallel={"tp": 2}, memory={"recompute": ()})`."""
    run = workload.run
    made = {name: replace(getattr(run, name), **keys) for name, keys in sections.items()}
    return replace(workload, run=replace(run, **made))
