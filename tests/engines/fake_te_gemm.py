"""A fake of Transformer Engine's GEMM functions on CPU: refuses what csrc/extensions/gemm.cpp refuses, and computes.

The library reads an operand from its first element on, as if it were contiguous, and does not check it; the fake
refuses one that is not. Outputs are written in place, in the order of the row counts; an output that the library would
leave alone stays as it was given.
"""

from __future__ import annotations

from types import ModuleType

import torch
from tests.engines.fake_te_storage import DType, Storage
from tests.engines.rank_threads import require
from torch import Tensor

LAYOUTS = ("TN", "NN", "NT")
# float32 is taken too, but multiplied in TF32.
DTYPES = (torch.bfloat16, torch.float16)


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    out: Tensor | None = None,
) -> tuple[Tensor, None, None, None]:
    result = _product(A, B, layout).to(out_dtype or A.dtype)
    if out is None:
        return result, None, None, None
    require(out.is_contiguous() and out.shape == result.shape and out.dtype == result.dtype, "the output does not fit")
    return out.copy_(result), None, None, None


def general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    out: list[Tensor],
    quantization_params: list[None],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    single_output: bool = False,
) -> tuple[list[Tensor], None, None]:
    require(isinstance(A, list) and isinstance(B, list) and isinstance(out, list), "operands must be lists")
    require(len(A) == len(B) == len(quantization_params) > 0, "as many weights as inputs")
    require(m_splits is not None and all(type(size) is int for size in m_splits), "row counts must be on the host")
    assert m_splits is not None
    require([len(_values(each)) for each in B] == m_splits, "row counts and inputs differ")
    require(out[0].dtype == out_dtype, "outputs have another dtype")
    if single_output:
        require(len(out) == 1 and out[0].is_contiguous() and len(out[0]) == sum(m_splits), "one output for all rows")
        require(out[0].numel() > 0, "an output of no entries has no address to write to")
        places = list(out[0].split(m_splits))
    else:
        require(len(out) == len(A), "an output for each")
        places = out
    for a, b, place in zip(A, B, places, strict=True):
        require(place.is_contiguous(), "outputs must be contiguous")
        result = _product(a, b, layout)
        require(place.shape == result.shape, f"the output has shape {tuple(place.shape)}, not {tuple(result.shape)}")
        # Where an operand is empty nothing is multiplied, and the output is set to zero.
        place.copy_(result)
    return out, None, None


def _values(operand: Tensor | Storage) -> Tensor:
    return operand.values() if isinstance(operand, Storage) else operand


def _product(a: Tensor | Storage, b: Tensor | Storage, layout: str) -> Tensor:
    require(layout in LAYOUTS, f"no layout {layout}")
    if isinstance(a, Storage) or isinstance(b, Storage):
        require(layout == "TN", "rowwise halves are multiplied by TN")
        require(isinstance(a, Storage) and isinstance(b, Storage), "both operands are narrow, or none")
        narrow, wide = _values(a), _values(b)
        require(narrow.shape[1] == wide.shape[1] and narrow.shape[1] % 16 == 0, "K in multiples of 16")
        return wide @ narrow.t()
    require(a.is_contiguous() and b.is_contiguous(), "an operand is read as if it were contiguous")
    require(a.dtype == b.dtype and a.dtype in DTYPES, "operands must be of one dtype of 16 bits")
    require(a.dim() == b.dim() == 2, "operands must be matrices")
    left = b.float().t() if layout[1] == "T" else b.float()
    right = a.float().t() if layout[0] == "T" else a.float()
    require(left.shape[1] == right.shape[0], f"invalid matrix dimensions {tuple(a.shape)} and {tuple(b.shape)}")
    return left @ right


def fake_te_gemm() -> ModuleType:
    module = ModuleType("transformer_engine.pytorch.cpp_extensions")
    module.__dict__.update({"general_gemm": general_gemm, "general_grouped_gemm": general_grouped_gemm, "DType": DType})
    return module
