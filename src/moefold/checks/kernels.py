"""Rules about who carries out the steps between products."""

from __future__ import annotations

from moefold.config.run import RunConfig
from moefold.errors import Problem


def kernels_are_not_float64(run: RunConfig) -> Problem | None:
    if run.precision.kernels == "torch" or run.precision.compute != "float64":
        return None
    return Problem(
        "precision.kernels", f"{run.precision.kernels} kernels compute in float32", "use torch, or compute float32"
    )


def kernels_do_not_meet_fused_experts(run: RunConfig) -> Problem | None:
    if run.model.moe is None or run.precision.kernels != "triton" or run.precision.experts != "fused":
        return None
    return Problem(
        "precision.kernels",
        f"{run.precision.kernels} kernels run on GPUs, and precision.experts fused on CPUs",
        "use torch, or precision.experts grouped",
    )


def native_kernels_are_for_fused_experts(run: RunConfig) -> Problem | None:
    if run.model.moe is None or run.precision.kernels != "native" or run.precision.experts == "fused":
        return None
    return Problem(
        "precision.kernels",
        f"native activations are those of dense layers and of fused experts, and precision.experts is "
        f"{run.precision.experts}",
        "use torch, or precision.experts fused",
    )


RULES = (kernels_are_not_float64, kernels_do_not_meet_fused_experts, native_kernels_are_for_fused_experts)
