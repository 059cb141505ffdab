"""torch dtypes by their config names, and the dtypes of a model's parameters and buffers."""

from __future__ import annotations

import torch
from torch import nn

# `checks/planned_only.py` refuses other formats, and float16 where values are kept.
TORCH_FORMATS: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def set_param_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in ``dtype``; buffers in at least float32, because small updates would be rounded away in bfloat16."""
    model.to(dtype)
    buffer_dtype = torch.promote_types(dtype, torch.float32)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(buffer_dtype))
