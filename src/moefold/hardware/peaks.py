"""Peak arithmetic of accelerators: what MFU is a fraction of.

Dense bfloat16 matmuls, without sparsity, as the makers state them (for GB200 and GB300 the 2,450 that NVIDIA's own
benchmark recipes divide by; for MI355X the 2,300 of AMD's). Sustained rates are lower: that is what MFU shows.

A device that is not listed has no peak, and then there is no MFU. A guess would be worse: the PCIe and NVL GPUs of a
generation are slower than their namesakes, and a MIG slice is a fraction of its GPU.
"""

from __future__ import annotations

import re

from moefold.hardware.gpu import GPUS

# Variants with a dash in their name are not told apart by what torch prints.
_KNOWN = {name: gpu.bf16_tflops for name, gpu in GPUS.items() if "-" not in name}
_OTHER_CARD = {"PCIE", "NVL", "MIG"}
# The A100's PCIe GPU has the same peak.
_SAME_AS_PCIE = {"A100"}


def peak_flops(device: str, compute: str = "bfloat16") -> float | None:
    """FLOP/s of the device that torch calls `device` ("NVIDIA H100 80GB HBM3"); None if it is not known.

    Peaks are those of bfloat16; wider formats use other units of the chip and have none here.
    """
    words = re.findall(r"[A-Z0-9]+", device.upper())
    model = next((word for word in words if word in _KNOWN), None)
    if model is None or compute != "bfloat16":
        return None
    others = _OTHER_CARD.intersection(words) - ({"PCIE"} if model in _SAME_AS_PCIE else set())
    return None if others else _KNOWN[model] * 1e12
