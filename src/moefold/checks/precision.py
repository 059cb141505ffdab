"""Rules about number formats, among them what torch's grouped matmul can take."""

from __future__ import annotations

from moefold.config.precision import Format
from moefold.config.run import RunConfig
from moefold.errors import Problem

BYTES: dict[Format, int] = {"float64": 8, "float32": 4, "bfloat16": 2}
# grouped_mm reads rows in pieces of this many bytes and refuses others.
ROW_BYTES = 16


def compute_is_not_wider_than_params(run: RunConfig) -> Problem | None:
    params, compute = run.precision.params, run.precision.compute
    if BYTES[compute] <= BYTES[params]:
        return None
    return Problem(
        "precision.compute", f"{compute} is wider than the parameters' {params}", f"use {params}, or params {compute}"
    )


def grouped_experts_are_not_float64(run: RunConfig) -> Problem | None:
    if run.model.moe is None or run.precision.experts != "grouped" or run.precision.compute != "float64":
        return None
    return Problem(
        "precision.experts",
        "torch's grouped matmul has no float64 kernel",
        "use fused or sequential, or compute float32",
    )


def grouped_rows_are_aligned(run: RunConfig) -> list[Problem]:
    """Rows of experts' matrices are as long as what goes in: the (latent) width, and this rank's expert width."""
    moe, precision = run.model.moe, run.precision
    if moe is None or precision.experts != "grouped" or precision.compute == "float64":
        return []
    multiple = ROW_BYTES // BYTES[precision.compute]
    inner = "model.dim" if moe.latent_dim is None else "model.moe.latent_dim"
    rows = {
        inner: moe.latent_dim or run.model.dim,
        "model.moe.expert_hidden_dim": moe.expert_hidden_dim // max(run.parallel.etp, 1),
    }
    return [
        Problem(
            path,
            f"rows of {size} {precision.compute} numbers (experts, etp={run.parallel.etp}) are not a multiple of "
            f"{ROW_BYTES} bytes, which the grouped matmul needs",
            f"make it a multiple of {multiple}, or use precision.experts fused or sequential",
        )
        for path, size in rows.items()
        if size % multiple
    ]


def fused_experts_compute_the_rows_there_are(run: RunConfig) -> Problem | None:
    """Padding keeps a GPU from waiting for counts; the fused experts need those counts."""
    moe = run.model.moe
    if moe is None or run.precision.experts != "fused" or moe.capacity is None or not moe.capacity.pad:
        return None
    return Problem(
        "model.moe.capacity.pad",
        "precision.experts fused computes the rows that experts have, not empty ones",
        "use pad false, or precision.experts grouped",
    )


def fused_experts_weigh_inside(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or run.precision.experts != "fused" or moe.weight_at == "activation":
        return None
    return Problem(
        "model.moe.weight_at",
        f"precision.experts fused never keeps an expert's {moe.weight_at} to weigh it",
        "use activation, or precision.experts grouped",
    )


RULES = (
    compute_is_not_wider_than_params,
    grouped_experts_are_not_float64,
    grouped_rows_are_aligned,
    fused_experts_compute_the_rows_there_are,
    fused_experts_weigh_inside,
)
