"""A fake of DeepGEMM's bfloat16 grouped GEMMs on CPU: refuses what csrc/apis/gemm.hpp refuses, and computes.

Outputs are written in place, as the library does it; rows of padding become NaN, because the library promises nothing
about them. A block of rows with two experts is refused, where the kernel would compute all of it with the first one's
weights.
"""

from __future__ import annotations

from types import ModuleType

import torch
from tests.engines.rank_threads import require
from torch import Tensor

ALIGNMENT = 128


def get_mk_alignment_for_contiguous_layout() -> int:
    return ALIGNMENT


def m_grouped_bf16_gemm_nt_contiguous(a: Tensor, b: Tensor, d: Tensor, grouped_layout: Tensor) -> None:
    """[M, K] @ [G, N, K].mT"""
    require(a.dim() == 2 and a.stride(-1) == 1, "rows must be K-major")
    _check_majors(b)
    require(d.is_contiguous(), "the output must be N-major")
    require(all(each.dtype == torch.bfloat16 for each in (a, b, d)), "all matrices must be bfloat16")
    require(grouped_layout.dtype == torch.int32 and grouped_layout.is_contiguous(), "the layout must be int32")
    (m, k), (num_groups, n, k_of_b) = a.shape, b.shape
    require(k == k_of_b and d.shape == (m, n) and grouped_layout.shape == (m,), "shapes do not fit")
    require(a.stride(0) * 2 % 16 == 0 and n * 2 % 16 == 0, "TMA loads rows in steps of 16 bytes")
    require(m % ALIGNMENT == 0, f"{m} rows are not whole blocks of {ALIGNMENT}")
    experts = grouped_layout.view(-1, ALIGNMENT)
    for block, numbers in enumerate(experts):
        real = numbers[numbers >= 0].unique()
        require(len(real) <= 1, f"block {block} has rows of experts {real.tolist()}")
        require(bool((numbers < num_groups).all()), "an expert's number is out of range")
    safe = grouped_layout.clamp(min=0).long()
    product = torch.einsum("mk,mnk->mn", a.float(), b.float()[safe])
    d.copy_(product.to(d.dtype).where((grouped_layout >= 0)[:, None], torch.nan))


def m_grouped_bf16_gemm_nn_contiguous(a: Tensor, b: Tensor, d: Tensor, grouped_layout: Tensor) -> None:
    """[M, K] @ [G, K, N]"""
    m_grouped_bf16_gemm_nt_contiguous(a, b.transpose(1, 2), d, grouped_layout)


def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor, b: Tensor, d: Tensor, ks_cpu: list[int], grouped_layout: Tensor, c: Tensor | None = None
) -> None:
    """d[g] = c[g] + a[g].T @ b[g], with the rows of a group summed."""
    require(all(each.is_contiguous() for each in (a, b, d, grouped_layout)), "matrices must be contiguous")
    require(a.dtype == b.dtype == torch.bfloat16, "both matrices must be bfloat16")
    assert c is not None, "the library needs a matrix to add to"
    require(c.dtype == d.dtype == torch.float32 and c.shape == d.shape, "it adds in float32")
    require(grouped_layout.dtype == torch.int32 and grouped_layout.tolist() == ks_cpu, "the layout is not that of ks")
    require(all(k % ALIGNMENT == 0 for k in ks_cpu), f"{ks_cpu} are not whole blocks of {ALIGNMENT}")
    require(sum(ks_cpu) == len(a) == len(b), "rows and sizes differ")
    require(d.shape == (len(ks_cpu), a.shape[1], b.shape[1]), "shapes do not fit")
    parts = zip(a.float().split(ks_cpu), b.float().split(ks_cpu), strict=True)
    d.copy_(c + torch.stack([left.t() @ right for left, right in parts]))


def _check_majors(b: Tensor) -> None:
    require(b.dim() == 3 and b.stride(0) == b.shape[1] * b.shape[2], "groups must be packed")
    require(b.stride(-1) == 1 or b.stride(-2) == 1, "neither dim of the weights is contiguous")


def fake_deep_gemm() -> ModuleType:
    module = ModuleType("deep_gemm")
    for function in (
        get_mk_alignment_for_contiguous_layout,
        m_grouped_bf16_gemm_nt_contiguous,
        m_grouped_bf16_gemm_nn_contiguous,
        k_grouped_bf16_gemm_tn_contiguous,
    ):
        setattr(module, function.__name__, function)
    return module
