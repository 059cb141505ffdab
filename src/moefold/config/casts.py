"""How one operand of a matmul is narrowed, as data.

A ``Cast`` says everything that decides bits: the element's format, which values share a scale, how the scale is found,
what is done to values before and how they are rounded. `precision/quantize.py` carries it out, kernels must agree with
that to the last bit, and the planner reads bytes from here.

Blocks are rows x columns of a matrix whose last dim is the one that the matmul sums over; the "columnwise" copy of a
matrix is the cast of its transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# bf16 has no scale: it is the cast of operands that are wider where they come from.
Element = Literal["e4m3", "e5m2", "e2m1", "bf16"]
# How the scale of a block follows from its largest magnitude, amax, and the element's largest number, top:
#   float32       amax / top, in float32;
#   power_of_two  the same rounded up to a power of two, still stored as float32;
#   e8m0_rceil    the same in one byte, an exponent (cuBLAS, Transformer Engine, torchao for MoE training);
#   e8m0_floor    an exponent from that of amax alone, so that the largest values saturate (OCP MX 1.0);
#   two_level     an E4M3 number per block, under one float32 scale per tensor (NVFP4).
ScaleRule = Literal["float32", "power_of_two", "e8m0_rceil", "e8m0_floor", "two_level", "none"]
Rounding = Literal["nearest", "stochastic"]

ELEMENT_BITS: dict[Element, int] = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "bf16": 16}
SCALE_BYTES: dict[ScaleRule, int] = {
    "float32": 4,
    "power_of_two": 4,
    "e8m0_rceil": 1,
    "e8m0_floor": 1,
    "two_level": 1,
    "none": 0,
}


@dataclass(frozen=True)
class Cast:
    """``block`` None: the whole matrix has one scale. A block of 0 columns is a whole row. Of a stack of matrices, each
    is narrowed by itself."""

    element: Element
    block: tuple[int, int] | None
    scale: ScaleRule
    # A Hadamard transform of 16 values along the last dim, with fixed signs, rounded to bfloat16; both operands of a
    # matmul need it, then it cancels.
    hadamard: bool = False
    rounding: Rounding = "nearest"
    # The amax of earlier steps decides the scale, and larger values saturate.
    delayed: bool = False

    @property
    def bytes_per_value(self) -> float:
        """Of codes and block scales; scales of whole rows and matrices are left out."""
        size = 0 if self.block is None else self.block[0] * self.block[1]
        return ELEMENT_BITS[self.element] / 8 + (SCALE_BYTES[self.scale] / size if size else 0.0)

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of a block of a matrix of this size, which may be partial at its ends."""
        high, wide = self.block or (rows, 0)
        return max(high, 1), max(wide or columns, 1)

    @property
    def scales_whole_matrix(self) -> bool:
        """The largest magnitude of the matrix is in every scale: of a shard, ranks must agree on it."""
        return self.scale != "none" and (self.block is None or self.scale == "two_level")

    @property
    def is_square(self) -> bool:
        """Whether the transpose of a matrix has the same codes and scales, transposed: one copy of it serves both of
        its matmuls."""
        square = self.block is None or self.block[0] == self.block[1]
        return square and not self.hadamard and self.rounding == "nearest"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One scale per block of a matrix, or of a stack of matrices, of this shape.

        >>> Cast("e4m3", (128, 128), "power_of_two").scale_shape((4, 576, 256))
        (4, 5, 2)
        """
        *stack, rows, columns = shape
        high, wide = self.block_of(rows, columns)
        return (*stack, -(-rows // high), -(-columns // wide))

    def __str__(self) -> str:
        """As in `e4m3 1x128 power_of_two`."""
        if self.element == "bf16":
            return self.element
        block = "tensor" if self.block is None else f"{self.block[0]}x{self.block[1] or 'row'}"
        more = (("hadamard", self.hadamard), ("stochastic", self.rounding == "stochastic"), ("delayed", self.delayed))
        return " ".join((self.element, block, self.scale, *(word for word, said in more if said)))
