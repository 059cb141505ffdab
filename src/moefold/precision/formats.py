"""From the brain's names of number formats to torch's."""

from __future__ import annotations

import torch

from moefold.config.precision import Format

TORCH_FORMATS: dict[Format, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
