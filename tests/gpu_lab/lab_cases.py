"""Runs for the GPU laboratory: every recipe's proxy, and every kind of layout.

Sizes are the smallest that have all parts: what a step launches does not depend on them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from moefold.config.parallel import NamedDispatcher
from moefold.recipes.catalog import RECIPES
from moefold.schedule.names import SCHEDULES


class LabCase(NamedTuple):
    """A recipe with changes, on so many ranks."""

    recipe: str
    world: int
    changes: dict[str, Any]
    microbatches: int | None = None


BFLOAT16 = {"precision.compute": "bfloat16", "kernels.experts": "grouped"}
SMALL = {"data.global_batch": 16, "model.num_layers": 2}
GPU = BFLOAT16 | {"kernels.backend": "triton"}
BASE = "deepseek_v3_proxy"


def case(recipe: str, world: int, microbatches: int | None = None, **keys: Any) -> LabCase:
    """Keys with __ for the dots."""
    changes = {name.replace("__", "."): value for name, value in keys.items()}
    return LabCase(recipe, world, GPU | SMALL | changes, microbatches)


def _proxies() -> dict[str, LabCase]:
    """Each family with experts on two ranks, tensor and data parallelism in turn."""
    found = {}
    for number, name in enumerate(name for name in RECIPES if name.endswith("_proxy")):
        second = ("tp", "cp", "pp")[number % 3]
        found[name] = case(name, 4, 2, parallel__ep=2, **{f"parallel__{second}": 2})
    return found


def _schedules() -> dict[str, LabCase]:
    """All orders, with an MTP module; interleaved also with three ranks, where the ring of stages is odd."""
    found = {}
    for name, schedule in SCHEDULES.items():
        virtual = schedule.virtual or 2
        keys = {"parallel__schedule": name, "parallel__vpp": virtual, "model__num_layers": 2 * virtual}
        found[name] = case(BASE, 4, 4 * virtual, parallel__pp=2, parallel__ep=2, model__num_mtp=1, **keys)
    odd = {"parallel__schedule": "interleaved", "parallel__vpp": 2, "model__num_layers": 6}
    found["interleaved on three"] = case(BASE, 3, 6, parallel__pp=3, **odd)
    found["1f1b on three"] = case(BASE, 3, 6, parallel__pp=3)
    found["tied embeddings"] = case(BASE, 3, 3, parallel__pp=3, model__tied_embeddings=True)
    return found


def _dispatchers() -> dict[str, LabCase]:
    found = {}
    for name in get_args(NamedDispatcher):
        inner = {"parallel__ep_inner": 2} if name == "two_level" else {}
        found[name] = case("qwen3_30b_a3b_proxy", 4, 1, parallel__ep=4, parallel__dispatcher=name, **inner)
        found[f"{name} over etp"] = case(
            "mixtral_8x7b_proxy", 4, 1, parallel__ep=2, parallel__etp=2, parallel__dispatcher=name
        )
        found[f"{name}, overlapped"] = case(
            BASE, 4, 4, parallel__pp=2, parallel__ep=2, parallel__schedule="1f1b_overlapped",
            parallel__dispatcher=name, **({"parallel__ep_inner": 2} if inner else {}),
        )  # fmt: skip
        found[f"{name} in chunks"] = case(
            "deepseek_v2_lite_proxy", 4, 1, parallel__ep=4, parallel__exchange_chunks=2,
            parallel__overlap=("shared_experts",), parallel__dispatcher=name, **inner,
        )  # fmt: skip
    capacity = {"model__moe__capacity__factor": 1.5}
    found["capacity"] = case("qwen3_30b_a3b_proxy", 2, 1, parallel__ep=2, **capacity)
    found["capacity, padded"] = case(
        "qwen3_30b_a3b_proxy", 2, 1, parallel__ep=2, model__moe__capacity__pad=True, **capacity
    )
    return found


def _contexts() -> dict[str, LabCase]:
    found = {}
    for mode in ("ring", "all_to_all", "hierarchical"):
        keys = {"parallel__context__full": mode, "parallel__context__windowed": mode}
        inner = {"parallel__context__inner": 2} if mode == "hierarchical" else {}
        for recipe in ("gpt_oss_20b_proxy", BASE):
            found[f"{mode}, {recipe}"] = case(recipe, 4, 1, parallel__cp=4, **keys, **inner)
        found[f"{mode} in a pipeline"] = case(BASE, 4, 2, parallel__cp=2, parallel__pp=2, **keys)
    return found


def _shardings() -> dict[str, LabCase]:
    return {
        "data parallel": case(BASE, 2, 1),
        "replicas": case(BASE, 4, 1, parallel__dp_replicate=2, parallel__edp_replicate=2),
        "replicas of experts": case(BASE, 4, 1, parallel__ep=2, parallel__dp_replicate=2, parallel__edp_replicate=2),
        "tensor parallel": case(BASE, 2, 1, parallel__tp=2),
        "folded": case(BASE, 8, 2, parallel__tp=2, parallel__cp=2, parallel__pp=2, parallel__ep=4),
        "experts over tensor parallel": case(BASE, 4, 1, parallel__tp=2, parallel__ep=4),
        "in a shard's pipeline": case(BASE, 4, 4, parallel__pp=2),
        "flat buffers": case(
            BASE,
            8,
            4,
            parallel__pp=2,
            parallel__vpp=2,
            parallel__ep=2,
            parallel__schedule="interleaved",
            parallel__sharding="flat",
            model__num_mtp=1,
            model__num_layers=4,
        ),
    }


def _graphs() -> dict[str, LabCase]:
    """Several microbatches in each slot: one before the capture, one that is captured, and replays."""
    # Without collectives inside of the router.
    flat = {"parallel__sharding": "flat", "kernels__graphs": "partial", "model__moe__balance__global_batch": 0.0}
    whole = {"kernels__graph_scope": ("attn", "moe_router", "moe", "mlp"), "parallel__dispatcher": "all_to_all_bounded"}
    return {
        "graphs": case(BASE, 2, 4, parallel__ep=2, **flat),
        "graphs in a pipeline": case(BASE, 4, 6, parallel__pp=2, parallel__ep=2, model__num_mtp=1, **flat),
        "graphs of layers": case("qwen3_30b_a3b_proxy", 4, 4, parallel__ep=4, **flat, **whole),
        "graphs of layers in a pipeline": case(
            BASE, 4, 8, parallel__pp=2, parallel__vpp=2, parallel__ep=2, parallel__schedule="interleaved",
            model__num_layers=4, **flat, **whole,
        ),
        "graphs of torch's kernels": case(BASE, 2, 4, parallel__ep=2, kernels__backend="torch", **flat, **whole),
    }  # fmt: skip


def _documents() -> dict[str, LabCase]:
    return {
        "masked documents": case(BASE, 2, 1, data__packing="concat_masked", parallel__ep=2),
        "padded documents": case("qwen3_30b_a3b_proxy", 2, 1, data__packing="padded", parallel__ep=2),
        "packed documents": case(BASE, 2, 1, data__packing="bin_packed", parallel__cp=2),
        "recomputed": case(BASE, 2, 2, memory__recompute=("attention", "feed_forward", "experts"), parallel__ep=2),
        "MTP": case(BASE, 2, 1, model__num_mtp=2, parallel__ep=2),
        "torch's kernels": case(BASE, 2, 1, parallel__ep=2, kernels__backend="torch"),
        "sequential experts in float32": case(
            BASE, 2, 1, parallel__ep=2, precision__compute="float32", kernels__experts="sequential"
        ),
    }


def _narrow() -> dict[str, LabCase]:
    """Precision recipes with torch's narrow GEMMs: fake tensors are held to its rules about shapes and strides."""
    narrow = {"kernels__narrow_gemm": "scaled_mm", "kernels__row_padding": "permute", "kernels__casts": "triton"}
    found = {
        f"{name}, narrow GEMMs": case(BASE, 2, 1, parallel__ep=2, precision__recipe=name, **narrow)
        for name in ("fp8_tensor", "fp8_blockwise", "mxfp8", "nvfp4")
    }
    found["fp8_rowwise, narrow GEMMs"] = case(
        BASE, 2, 1, parallel__ep=2, precision__recipe="fp8_rowwise", **narrow | {"kernels__casts": "torch"}
    )
    found["mxfp8, kept and sent narrow"] = case(
        "qwen3_30b_a3b_proxy", 4, 2, parallel__ep=4, precision__recipe="mxfp8", precision__dispatch="mxfp8",
        memory__retain={"rows": "quantize", "activation": "quantize"}, **narrow,
    )  # fmt: skip
    found["mxfp8, emulated"] = case(
        BASE, 2, 1, parallel__ep=2, precision__recipe="mxfp8", kernels__casts="triton", kernels__experts="sequential"
    )
    return found


CASES: dict[str, LabCase] = {
    **_proxies(), **_schedules(), **_dispatchers(), **_contexts(), **_shardings(), **_documents(), **_narrow(),
    **_graphs(),
}  # fmt: skip
