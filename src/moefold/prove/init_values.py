"""First values for a proof: nothing at zero, nothing at one.

A bias that starts at zero hides a bias added twice; a norm weight of one hides a norm applied to the wrong width. So
every parameter and every loss-free bias starts as a busy, layout-independent random number.
"""

from __future__ import annotations

from torch import Tensor

from moefold.nn.init import Box, normal_part


def busy_values(kind: str, seed: int, name: str, shape: tuple[int, ...], box: Box, std: float, into: Tensor) -> None:
    normal_part(seed, name, shape, box, std, into)
    if kind == "norm":
        into.add_(1.0)
