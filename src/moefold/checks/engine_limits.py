"""Rules about dispatchers and GEMMs of other libraries: what each takes, known before anything is installed.

The limits are those that the libraries' own source states, at the versions of docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from moefold.config.parallel import EngineDispatcher
from moefold.config.run import RunConfig
from moefold.errors import Problem

ENGINES: tuple[str, ...] = get_args(EngineDispatcher)
DEEPEP = ("deepep", "deepep_elastic")
# Dispatchers whose kernels are told how many SMs to use; hybridep is planned only.
TAKES_SMS = (*DEEPEP, "hybridep")
ENGINE_EXPERTS = ("deepgemm", "mxfp8", "transformer_engine")
# Sizes of ep groups for which DeepEP's Buffer has a configuration.
DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
# Entries of a bfloat16 row that fill 16 bytes, and values that share a scale in MXFP8.
_ROW_MULTIPLE, _MX_BLOCK = 8, 32
# all_to_all_vdev_2d: ranks of a group, and experts of a rank.
_SYMMETRIC_RANKS = _SYMMETRIC_EXPERTS = 16
_OTHERWISE = "or use parallel.dispatcher all_to_all"


def engine_dispatchers_do_not_split_experts(run: RunConfig) -> Problem | None:
    name, etp = run.parallel.dispatcher, run.parallel.etp
    if name not in ENGINES or etp == 1:
        return None
    return Problem("parallel.etp", f"{name} sends rows to one rank per expert, but etp={etp}", f"use 1, {_OTHERWISE}")


def deepep_rows_are_bfloat16(run: RunConfig) -> Problem | None:
    if run.model.moe is None or run.parallel.dispatcher not in DEEPEP or run.precision.compute == "bfloat16":
        return None
    return Problem(
        "precision.compute",
        f"{run.parallel.dispatcher} sends rows in bfloat16, not in {run.precision.compute}",
        f"use bfloat16, {_OTHERWISE}",
    )


def deepep_rows_are_aligned(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or run.parallel.dispatcher not in DEEPEP:
        return None
    path, dim = ("model.dim", run.model.dim) if moe.latent_dim is None else ("model.moe.latent_dim", moe.latent_dim)
    if dim % _ROW_MULTIPLE == 0:
        return None
    return Problem(
        path,
        f"rows of {dim} bfloat16 numbers are not a multiple of 16 bytes, which {run.parallel.dispatcher} needs",
        f"make it a multiple of {_ROW_MULTIPLE}, {_OTHERWISE}",
    )


def deepep_has_a_config_for_ep(run: RunConfig) -> Problem | None:
    ep = run.parallel.ep
    if run.parallel.dispatcher != "deepep" or ep == 1 or ep in DEEPEP_RANKS:
        return None
    return Problem(
        "parallel.ep",
        f"DeepEP's Buffer has no configuration for {ep} ranks",
        f"use {', '.join(map(str, DEEPEP_RANKS))}, or parallel.dispatcher deepep_elastic",
    )


def kernels_can_be_given_sms(run: RunConfig) -> Problem | None:
    """Ours go by NCCL, which has no such argument, and all_to_all_vdev_2d chooses by itself."""
    sms, name, path = run.parallel.dispatch_sms, run.parallel.dispatcher, "parallel.dispatch_sms"
    if sms is None:
        return None
    if run.model.moe is None or name not in TAKES_SMS:
        words = f"is {sms}, but no kernel of the {name} dispatcher takes a number of SMs"
        return Problem(path, words, f"use null, or parallel.dispatcher {', '.join(TAKES_SMS)}")
    if name == "deepep" and sms % 2:
        return Problem(
            path, f"is {sms}, but the kernels of DeepEP's Buffer use SMs in pairs", f"use {sms - 1 or 2} or {sms + 1}"
        )
    return None


def symmetric_memory_fits_its_kernel(run: RunConfig) -> list[Problem]:
    return list(_symmetric_limits(run)) if run.parallel.dispatcher == "symmetric_memory" else []


def _symmetric_limits(run: RunConfig) -> Iterator[Problem]:
    moe, parallel = run.model.moe, run.parallel
    if parallel.pp > 1:
        yield Problem(
            "parallel.pp",
            f"symmetric_memory synchronises all ranks of the job in every exchange, but pp={parallel.pp} stages "
            "exchange at different times",
            f"use 1, {_OTHERWISE}",
        )
    if parallel.ep > _SYMMETRIC_RANKS:
        yield Problem(
            "parallel.ep",
            f"all_to_all_vdev_2d takes at most {_SYMMETRIC_RANKS} ranks, but ep={parallel.ep}",
            f"use at most {_SYMMETRIC_RANKS}, {_OTHERWISE}",
        )
    local = moe.num_experts // max(parallel.ep, 1) if moe is not None else 0
    if local > _SYMMETRIC_EXPERTS:
        yield Problem(
            "parallel.ep",
            f"all_to_all_vdev_2d takes at most {_SYMMETRIC_EXPERTS} experts per rank, but ep={parallel.ep} leaves "
            f"{local}",
            f"use a larger ep, {_OTHERWISE}",
        )


def engine_experts_are_bfloat16(run: RunConfig) -> Problem | None:
    name, compute = run.kernels.experts, run.precision.compute
    if run.model.moe is None or name not in ENGINE_EXPERTS or compute == "bfloat16":
        return None
    return Problem(
        "kernels.experts", f"{name} computes from bfloat16, not from {compute}", "use grouped, or compute bfloat16"
    )


def te_linear_is_bfloat16(run: RunConfig) -> Problem | None:
    """Transformer Engine multiplies float32 in TF32, and has no float64."""
    name, compute = run.kernels.linear, run.precision.compute
    if name == "torch" or compute == "bfloat16":
        return None
    return Problem("kernels.linear", f"{name} multiplies bfloat16, not {compute}", "use torch, or compute bfloat16")


def mxfp8_dims_fill_blocks(run: RunConfig) -> list[Problem]:
    """Both dims of an expert's weights are summed over: one in the forward pass, the other in the backward pass."""
    moe = run.model.moe
    if moe is None or run.kernels.experts != "mxfp8":
        return []
    inner = "model.dim" if moe.latent_dim is None else "model.moe.latent_dim"
    dims = {
        inner: moe.latent_dim or run.model.dim,
        "model.moe.expert_hidden_dim": moe.expert_hidden_dim // max(run.parallel.etp, 1),
    }
    return [
        Problem(
            path,
            f"{size} values (experts, etp={run.parallel.etp}) do not divide into blocks of {_MX_BLOCK} with one scale",
            f"make it a multiple of {_MX_BLOCK}, or use kernels.experts grouped",
        )
        for path, size in dims.items()
        if size % _MX_BLOCK
    ]


def te_permute_fits_the_experts(run: RunConfig) -> list[Problem]:
    moe = run.model.moe
    if moe is None or run.kernels.permute != "transformer_engine":
        return []
    found = []
    if run.kernels.experts == "fused":
        found.append("kernels.experts fused permutes its rows itself")
    if run.precision.compute == "float64":
        found.append("Transformer Engine has no float64 kernel")
    if moe.capacity is not None and moe.capacity.pad:
        found.append("rows of padded capacities (model.moe.capacity.pad) are not padded by moe_permute")
    return [Problem("kernels.permute", message, "use backend") for message in found]


RULES = (
    engine_dispatchers_do_not_split_experts,
    deepep_rows_are_bfloat16,
    deepep_rows_are_aligned,
    deepep_has_a_config_for_ep,
    kernels_can_be_given_sms,
    symmetric_memory_fits_its_kernel,
    engine_experts_are_bfloat16,
    te_linear_is_bfloat16,
    mxfp8_dims_fill_blocks,
    te_permute_fits_the_experts,
)
