"""Which backend computes attention, by name (``kernels.attention``).

Optional packages are imported only for the backend that is named.
"""

from __future__ import annotations

from collections.abc import Callable

from moefold.attention.varlen import VarlenAttention
from moefold.attention.varlen_reference import ReferenceAttention
from moefold.attention.varlen_sdpa import SdpaAttention
from moefold.checks.kernels import attention_in_use
from moefold.config.run import RunConfig
from moefold.ops.backends import resolve
from moefold.ops.host_probe import HostInfo, probe_host


def _triton() -> VarlenAttention:
    from moefold.attention.varlen_triton import TritonAttention

    return TritonAttention()


def _flex() -> VarlenAttention:
    from moefold.attention.varlen_flex import FlexAttention

    return FlexAttention()


def _flash(version: int) -> Callable[[], VarlenAttention]:
    def make() -> VarlenAttention:
        from moefold.attention.varlen_flash import FlashAttention, flash_calls

        return FlashAttention(flash_calls(version))

    return make


ATTENTION: dict[str, Callable[[], VarlenAttention]] = {
    "reference": ReferenceAttention,
    "sdpa": SdpaAttention,
    "triton": _triton,
    "flex": _flex,
    "flash_attn_2": _flash(2),
    "flash_attn_3": _flash(3),
    "flash_attn_4": _flash(4),
}


def attention_named(
    name: str, device: str, number_format: str | None = None, here: HostInfo | None = None
) -> VarlenAttention:
    """That backend, or an error that says why it cannot run here and which ones can."""
    resolve("attention", name, device, probe_host() if here is None else here, number_format)
    return ATTENTION[name]()


def attention_for(run: RunConfig, device: str) -> VarlenAttention:
    """The backend of ``run.kernels.attention``."""
    return attention_named(attention_in_use(run), device, run.precision.compute)
