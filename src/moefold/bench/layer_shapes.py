"""Sizes of one mixture layer, and the three shapes that this project is measured on."""

from __future__ import annotations

from dataclasses import dataclass

from moefold.errors import ConfigError, Problem


@dataclass(frozen=True)
class LayerShape:
    """``shared`` is the hidden width of the expert that sees every token; 0 means none."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    shared: int = 0

    def __str__(self) -> str:
        shared = f" shared={self.shared}" if self.shared else ""
        return f"T={self.tokens} h={self.dim} f={self.hidden} E={self.experts} K={self.top_k}{shared}"

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    def flops(self) -> int:
        """Of the products of a forward and a backward pass."""
        return 3 * 6 * self.dim * (self.rows * self.hidden + self.tokens * self.shared)


# Few wide experts, many narrow ones beside a shared one, and very many very narrow ones.
SHAPES = {
    "a": LayerShape(tokens=2048, dim=1024, hidden=3584, experts=8, top_k=2),
    "b": LayerShape(tokens=4096, dim=1024, hidden=256, experts=64, top_k=8, shared=256),
    "c": LayerShape(tokens=4096, dim=512, hidden=128, experts=256, top_k=8),
}


def checked(shape: LayerShape) -> LayerShape:
    """The shape, if a layer can have it."""
    problems = [
        Problem(f"--{name.replace('_', '-')}", f"is {value}", "use 1 or more")
        for name, value in vars(shape).items()
        if value < 1 and name != "shared"
    ]
    if shape.shared < 0:
        problems.append(Problem("--shared", f"is {shape.shared}", "use 0 for no shared expert, or its hidden width"))
    if shape.top_k > shape.experts:
        problems.append(Problem("--top-k", f"{shape.top_k} of {shape.experts} experts", "use at most --experts"))
    if problems:
        raise ConfigError(*problems)
    return shape
