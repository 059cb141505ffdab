"""Peak arithmetic of accelerators: what MFU is a fraction of.

Dense bfloat16 products, without sparsity, as the makers state them (for GB200 and GB300 the 2,450 that NVIDIA's own
benchmark recipes divide by; for MI355X the 2,300 of AMD's). Sustained rates are lower: that is what MFU shows.

A device that is not listed has no peak, and then there is no MFU. A guess would be worse: the PCIe and NVL cards of a
generation are slower than their namesakes, and a MIG slice is a fraction of its card.
"""

from __future__ import annotations

import re

# 10^12 FLOP/s of one device.
BF16_TFLOPS: dict[str, float] = {
    "A100": 312,
    "H20": 148,
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "B200": 2250,
    "GB200": 2450,
    "B300": 2250,
    "GB300": 2450,
    "MI300X": 1307,
    "MI325X": 1307,
    "MI355X": 2300,
}
_OTHER_CARD = {"PCIE", "NVL", "MIG"}
# The A100's PCIe card has the same peak.
_SAME_AS_PCIE = {"A100"}


def peak_flops(device: str, compute: str = "bfloat16") -> float | None:
    """FLOP/s of the device that torch calls `device` ("NVIDIA H100 80GB HBM3"); None if it is not known.

    Peaks are those of bfloat16; wider formats use other units of the chip and have none here.
    """
    words = re.findall(r"[A-Z0-9]+", device.upper())
    model = next((word for word in words if word in BF16_TFLOPS), None)
    if model is None or compute != "bfloat16":
        return None
    others = _OTHER_CARD.intersection(words) - ({"PCIE"} if model in _SAME_AS_PCIE else set())
    return None if others else BF16_TFLOPS[model] * 1e12
