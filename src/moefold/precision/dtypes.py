"""From the brain's names of number formats to torch's.

The format in which a model's parameters and statistics are held.
"""

from __future__ import annotations

import torch
from torch import nn

from moefold.config.precision import Format

TORCH_FORMATS: dict[Format, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


def set_param_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in ``dtype``; statistics never narrower than float32, where a small step would be rounded away."""
    model.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(wide))
