"""The cases that seeded faults are tried on, by name; each must hold without a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moefold.config.attention import GatedDeltaNetConfig, GQAConfig, RopeConfig
from moefold.config.data import DataConfig
from moefold.config.memory import MemoryConfig, RetainConfig
from moefold.config.model import LoraConfig, ModelConfig
from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.config.optim import OptimConfig
from moefold.config.parallel import ContextConfig, EchoConfig, ParallelConfig, RankOrderConfig
from moefold.config.precision import Format, KernelsConfig, PrecisionConfig
from moefold.config.precision_recipes import RecipeName
from moefold.config.run import RunConfig
from moefold.prove.cases import PROOF_OPTIM, Case, proof_kernels, proof_precision

_BALANCE = BalanceConfig(microbatch=0.3, sequence=0.2, global_batch=0.3, device=0.1, device_groups=2, z=0.01)
_ATTENTION = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=True)
_MOE = MoEConfig(num_experts=8, top_k=2, expert_hidden_dim=8, balance=_BALANCE)
_MODEL = ModelConfig(
    vocab_size=48,
    dim=24,
    num_layers=2,
    attention=_ATTENTION,
    rope=RopeConfig(theta=100.0),
    moe=_MOE,
    num_dense_layers=1,
    dense_hidden_dim=16,
    init_std=0.2,
)
# A shard boundary falls inside a sequence.
_DATA = DataConfig(seq_len=6, global_batch=12, micro_batch=3)


def _case(
    name: str, parallel: ParallelConfig, model: ModelConfig, data: DataConfig = _DATA, dtype: Format = "float64"
) -> Case:
    precision, kernels = proof_precision(dtype), proof_kernels(dtype)
    return Case(RunConfig(name, 5, model, parallel, precision, kernels, data, PROOF_OPTIM), 4)


def _changed(case: Case, optim: OptimConfig = PROOF_OPTIM, memory: MemoryConfig | None = None) -> Case:
    return replace(case, run=replace(case.run, optim=optim, memory=memory or case.run.memory))


def _with_remainder(case: Case) -> Case:
    return replace(case, run=replace(case.run, precision=replace(case.run.precision, master="remainder")))


def _narrowed(case: Case, recipe: RecipeName) -> Case:
    return replace(case, run=replace(case.run, precision=replace(case.run.precision, recipe=recipe)))


def _saved(case: Case, messages: PrecisionConfig, padding: KernelsConfig, retain: RetainConfig | None = None) -> Case:
    """What ranks gather and send as codes, where rows are padded, and which inputs are kept as codes."""
    run = case.run
    precision = replace(run.precision, gather=messages.gather, dispatch=messages.dispatch)
    kernels = replace(run.kernels, row_padding=padding.row_padding)
    memory = replace(run.memory, retain=retain or run.memory.retain)
    return replace(case, run=replace(run, precision=precision, kernels=kernels, memory=memory))


def _captured(case: Case) -> Case:
    return replace(case, run=replace(case.run, kernels=replace(case.run.kernels, graphs="partial")))


def _model(attention: GQAConfig = _ATTENTION, moe: MoEConfig = _MOE, **others: Any) -> ModelConfig:
    return replace(_MODEL, attention=attention, moe=moe, **others)


_PAGED = RetainConfig(rows="page", gate_up="page", activation="page")


def _paged(name: str, bound: float, memory: MemoryConfig) -> Case:
    """All rows fit into buffers, of which pages keep those that are there; several microbatches are in flight."""
    parallel = ParallelConfig(pp=2, ep=2, dispatcher="all_to_all_bounded", row_bound=bound, pair_bound=bound)
    return _changed(_case(name, parallel, _model(num_layers=4), replace(_DATA, global_batch=24)), memory=memory)


_ONE_STAGE = (
    _case(
        "folded",
        ParallelConfig(tp=2, ep=4),
        _model(
            replace(_ATTENTION, qk_norm="full"),
            replace(_MOE, router=RouterConfig(expert_bias=True, normalize=True), shared_hidden_dim=8),
        ),
    ),
    _case(
        "split",
        ParallelConfig(tp=2, ep=2, etp=2),
        _model(replace(_ATTENTION, qk_norm="head"), replace(_MOE, expert_mlp_bias=True)),
    ),
    _case(
        "gathered",
        ParallelConfig(tp=2, ep=2, dispatcher="all_gather"),
        _model(moe=replace(_MOE, capacity=CapacityConfig(factor=0.8))),
    ),
    # With bias, groups and a capacity per device, the plain top-k, the assignments and what is kept all differ.
    _case(
        "limited",
        ParallelConfig(tp=2, ep=4),
        _model(
            moe=replace(
                _MOE,
                num_experts=16,
                top_k=4,
                router=RouterConfig(
                    score="sigmoid",
                    normalize=True,
                    num_groups=4,
                    top_groups=2,
                    group_score="topk_sum",
                    expert_bias=True,
                ),
                capacity=CapacityConfig(factor=0.8, per="device", device_groups=4),
            )
        ),
    ),
    _case("deduplicated", ParallelConfig(ep=4, dispatcher="two_level", ep_inner=2), _model(moe=replace(_MOE, top_k=3))),
    # Rows of every microbatch fit, some assignments are dropped; and rows that do not fit, on all ranks but the last.
    _case(
        "bounded",
        ParallelConfig(tp=2, ep=4, dispatcher="all_to_all_bounded", row_bound=4.0, pair_bound=4.0),
        _model(moe=replace(_MOE, capacity=CapacityConfig(factor=0.8))),
    ),
    _case(
        "bounded, run twice",
        ParallelConfig(tp=2, ep=4, dispatcher="all_to_all_bounded", row_bound=1.4, pair_bound=2.0),
        _model(moe=replace(_MOE, router=RouterConfig(expert_bias=True, normalize=True))),
    ),
    _paged("paged", 4.0, MemoryConfig(retain=_PAGED, page_rows=4, page_bound=1.3, page_spill=0.3)),
    _paged("paged, run twice", 4.0, MemoryConfig(retain=_PAGED, page_rows=1, page_bound=1.0)),
    # No axis has the neighbours that it usually has.
    _case(
        "ordered",
        ParallelConfig(tp=2, ep=2, rank_order=RankOrderConfig("dp-tp-cp-pp", "etp-edp-ep-pp")),
        _model(),
    ),
    _case(
        "ordered and split",
        ParallelConfig(tp=2, ep=2, etp=2, dispatcher="all_gather", rank_order=RankOrderConfig(expert="ep-etp-edp-pp")),
        _model(),
    ),
    _case("replicated", ParallelConfig(ep=2, dp_replicate=2, edp_replicate=2), _model()),
    _case("padded", ParallelConfig(tp=2, ep=4), _model(num_mtp=1), replace(_DATA, packing="padded")),
)
_LATER = (
    # All kinds of weights have adapters, and the base is trained too, so that its gradients are compared.
    _case(
        "adapters",
        ParallelConfig(tp=2, ep=2),
        _model(
            moe=replace(_MOE, shared_hidden_dim=8),
            lora=LoraConfig(rank=2, alpha=6.0, targets=("*.attention.*", "*.feed_forward.*", "*.experts.*")),
        ),
    ),
    # Several chunks per document and several documents per microbatch; heads over two ranks.
    _case(
        "delta",
        ParallelConfig(tp=2, ep=2),
        _model(linear_attention=GatedDeltaNetConfig(2, 4, 4, 6, 3, 2, chunk_size=4)),
        DataConfig(seq_len=13, global_batch=4, micro_batch=2, packing="concat_masked"),
    ),
)
_STAGES = (
    # Both pipeline ranks hold the tied embedding, and hidden states of two MTP modules cross stages.
    _case(
        "interleaved",
        ParallelConfig(pp=2, vpp=2, schedule="interleaved", stages="Et|tt|tm|mL", ep=2),
        _model(num_layers=4, num_mtp=2, tied_embeddings=True),
        replace(_DATA, global_batch=18, packing="concat_masked"),
    ),
    _case("deferred", ParallelConfig(pp=2, schedule="zb_h1", tp=2, ep=2), _model(num_layers=3)),
    _case(
        "overlapped",
        ParallelConfig(pp=2, schedule="1f1b_overlapped", ep=2),
        _model(num_layers=3),
        replace(_DATA, global_batch=16, micro_batch=2),
    ),
)
_CONTEXT = (
    _case(
        "ring",
        ParallelConfig(cp=4, ep=4),
        _model(replace(_ATTENTION, sinks=True), num_mtp=1),
        DataConfig(seq_len=17, global_batch=4, micro_batch=2, packing="bin_packed"),
    ),
    _case(
        "ulysses",
        ParallelConfig(cp=2, tp=2, ep=4, context=ContextConfig(full="all_to_all")),
        _model(),
        DataConfig(seq_len=13, global_batch=4, micro_batch=2, packing="concat_masked"),
    ),
    # Waves of two ranks per document and of one. Counts of other ranks' documents have other shapes, so the sequence
    # loss is off: one fault sums counts over too many ranks.
    _case(
        "dynamic",
        ParallelConfig(cp=2, ep=2, dynamic_cp=True),
        _model(moe=replace(_MOE, balance=replace(_BALANCE, sequence=0.0), capacity=CapacityConfig(factor=0.8))),
        DataConfig(seq_len=11, global_batch=8, micro_batch=1, packing="bin_packed"),
    ),
)
_FLAT = (
    # Replicas of both grids, so that sums have two steps.
    _case("flat", ParallelConfig(sharding="flat", ep=2, dp_replicate=2), _model()),
    # Buckets of a layer or less, which leave in the second of two backwards.
    _case(
        "flat, small buckets",
        ParallelConfig(sharding="flat", ep=2, bucket_mb=0.001),
        _model(num_layers=3),
        replace(_DATA, global_batch=24),
    ),
    # Two hosts of two ranks; experts are on all ranks, so that their buckets have four steps as well.
    _case(
        "flat, four steps",
        ParallelConfig(sharding="flat", param_sync="hierarchical", ranks_per_host=2),
        _model(),
    ),
    # Buckets of two stages of a rank, deferred weight gradients, and a weight that two ranks hold.
    _case(
        "flat pipeline",
        ParallelConfig(sharding="flat", pp=2, vpp=2, schedule="zb_v", ep=2),
        _model(num_layers=4, tied_embeddings=True),
        replace(_DATA, global_batch=24),
    ),
)
_SAVINGS = (
    # Several microbatches are in flight, so that host buffers are used again; slots of equal sizes in a group.
    _changed(
        _case(
            "retained",
            ParallelConfig(pp=2, ep=2),
            _model(moe=replace(_MOE, shared_hidden_dim=8), num_layers=4),
            replace(_DATA, global_batch=24),
        ),
        memory=MemoryConfig(
            retain=RetainConfig(
                attention_norm="offload", core="offload", feed_norm="discard", gate_up="offload", activation="discard"
            )
        ),
    ),
    _with_remainder(
        _case("remainder", ParallelConfig(sharding="flat", ep=2), _model(), replace(_DATA, seq_len=8), "bfloat16")
    ),
    # Matrices are cut over dp and tp; some heads are over the bound, on some ranks.
    _changed(
        _case("muon", ParallelConfig(tp=2, ep=2), _model()),
        optim=replace(PROOF_OPTIM, algorithm="muon", qk_clip=1.5),
    ),
)
# Several blocks of features and of tokens, the last ones partial; tensor parallelism cuts between blocks.
_BLOCKS = DataConfig(seq_len=37, global_batch=4, micro_batch=1)
_NARROW = (
    _narrowed(
        _case(
            "narrow",
            ParallelConfig(tp=2, ep=2),
            _model(replace(_ATTENTION, head_dim=32), replace(_MOE, expert_hidden_dim=40), dim=40, dense_hidden_dim=128),
            _BLOCKS,
        ),
        "mxfp8",
    ),
    _narrowed(
        _case(
            "narrow squares",
            ParallelConfig(ep=4),
            _model(moe=replace(_MOE, expert_hidden_dim=40), dim=40),
            _BLOCKS,
        ),
        "fp8_blockwise",
    ),
    # Inputs are kept as codes, weights are gathered as codes in ranges that end inside of matrices. Scales are float32,
    # so that no two are alike.
    _saved(
        _narrowed(
            _case(
                "narrow codes",
                ParallelConfig(sharding="flat", pp=2, schedule="zb_h1", ep=2),
                _model(moe=replace(_MOE, expert_hidden_dim=40), dim=40),
                replace(_BLOCKS, global_batch=8),
            ),
            "fp8_tensor",
        ),
        PrecisionConfig(gather="narrow"),
        KernelsConfig(row_padding="permute"),
        RetainConfig(attention_norm="quantize", rows="quantize", activation="quantize", dense="quantize"),
    ),
    # Rows are sent as codes, with rows of zeros between those of two ranks. Probs multiply outputs: a gradient that is
    # not narrowed on its way is then another one where it is narrowed again.
    _saved(
        _narrowed(
            _case(
                "narrow rows",
                ParallelConfig(ep=4, dispatcher="all_to_all"),
                _model(moe=replace(_MOE, expert_hidden_dim=40, weight_at="output"), dim=40),
                _BLOCKS,
            ),
            "mxfp8",
        ),
        PrecisionConfig(dispatch="mxfp8"),
        KernelsConfig(row_padding="routing_map"),
    ),
)
# Few tokens and many experts, so that some ranks have many more rows; all slots are used.
_CLONED = (
    _case(
        "cloned",
        ParallelConfig(ep=4, echo=EchoConfig(slots=2)),
        _model(moe=replace(_MOE, expert_mlp_bias=True)),
    ),
)
_SHARED = replace(_MOE, shared_hidden_dim=8, shared_gate=True)
_OVERLAPS = (
    # By gloo, whose rows the dispatcher sorts itself: shared memory is read in the order of the experts.
    _case(
        "shared beside",
        ParallelConfig(tp=2, ep=4, overlap=("shared_experts",), cpu_exchange="gloo"),
        _model(moe=_SHARED),
    ),
    # Rows do not fit into their bounds: steps run once more.
    _case(
        "bounded rows beside",
        ParallelConfig(tp=2, ep=4, overlap=("shared_experts",), dispatcher="all_to_all_bounded"),
        _model(moe=_SHARED),
    ),
    # Every rank sends and receives as many rows.
    _case(
        "balanced rows beside",
        ParallelConfig(ep=4, overlap=("shared_experts",)),
        _model(moe=replace(_SHARED, router=RouterConfig(kind="balanced"), balance=BalanceConfig())),
        DataConfig(seq_len=8, global_batch=8, micro_batch=2),
    ),
)
# Counts of the whole step are summed inside of the router, where graphs have no collectives.
_ROUTED = replace(_MOE, balance=replace(_BALANCE, global_batch=0.0))
_GRAPHED = (
    # Several microbatches take turns in one slot; and in two, of which both are in flight.
    _captured(
        _case("graphs", ParallelConfig(sharding="flat", ep=2), _model(moe=_ROUTED), replace(_DATA, global_batch=36))
    ),
    _captured(
        _case(
            "graphs in a pipeline",
            ParallelConfig(sharding="flat", pp=2, ep=2),
            _model(moe=_ROUTED, num_layers=3),
            replace(_DATA, global_batch=24),
        )
    ),
)
_CHUNKS = (
    # Nine tokens of each rank: the chunks differ in size.
    _case("chunks", ParallelConfig(tp=2, ep=4, exchange_chunks=2), _MODEL),
    _case(
        "chunks beside",
        ParallelConfig(tp=2, ep=4, exchange_chunks=3, overlap=("shared_experts",), dispatcher="deduplicated"),
        _model(moe=_SHARED),
    ),
    _case(
        "even chunks",
        ParallelConfig(ep=4, exchange_chunks=2),
        _MODEL,
        DataConfig(seq_len=8, global_batch=8, micro_batch=2),
    ),
)
_TENSOR = (
    # Nine tokens of each rank.
    _case(
        "tensor in chunks",
        ParallelConfig(tp=2, ep=2, overlap=("tensor_parallel",), tp_chunks=3),
        _model(moe=replace(_SHARED, router=RouterConfig())),
    ),
    _case(
        "tensor in chunks of one size",
        ParallelConfig(tp=2, ep=2, overlap=("tensor_parallel",)),
        _model(num_dense_layers=1),
        DataConfig(seq_len=8, global_batch=8, micro_batch=2),
    ),
)
_ULYSSES = (
    _case(
        "ulysses in chunks",
        ParallelConfig(cp=2, ep=2, context=ContextConfig(full="all_to_all"), overlap=("ulysses",), ulysses_chunks=3),
        _model(),
        DataConfig(seq_len=13, global_batch=8, micro_batch=2, packing="concat_masked"),
    ),
    _case(
        "ulysses in chunks of one size",
        ParallelConfig(cp=2, ep=2, context=ContextConfig(full="all_to_all"), overlap=("ulysses",)),
        _model(),
        DataConfig(seq_len=8, global_batch=8, micro_batch=2),
    ),
)
_LAYERS = (*_TENSOR, *_ULYSSES, *_OVERLAPS, *_CHUNKS, *_GRAPHED)
_ALL = (*_ONE_STAGE, *_LATER, *_STAGES, *_CONTEXT, *_FLAT, *_SAVINGS, *_NARROW, *_CLONED, *_LAYERS)
CASES = {case.run.name: case for case in _ALL}
