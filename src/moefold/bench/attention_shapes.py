"""Sizes of attention over packed documents of equal length."""

from __future__ import annotations

from dataclasses import dataclass

from moefold.errors import ConfigError, Problem


@dataclass(frozen=True)
class AttentionShape:
    tokens: int = 4096
    length: int = 1024
    heads: int = 16
    kv_heads: int = 4
    dim: int = 64

    def __str__(self) -> str:
        return f"T={self.tokens} documents of {self.length}, {self.heads} heads over {self.kv_heads}, d={self.dim}"

    @property
    def documents(self) -> int:
        return self.tokens // self.length

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.length,) * self.documents

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


def checked(shape: AttentionShape) -> AttentionShape:
    """The shape, if attention can have it."""
    problems = [
        Problem(f"--{name.replace('_', '-')}", f"is {value}", "use 1 or more")
        for name, value in vars(shape).items()
        if value < 1
    ]
    if not problems and shape.tokens % shape.length:
        problems.append(Problem("--tokens", f"{shape.tokens} in documents of {shape.length}", "use a multiple"))
    if not problems and shape.heads % shape.kv_heads:
        problems.append(Problem("--heads", f"{shape.heads} over {shape.kv_heads}", "use a multiple of --kv-heads"))
    if problems:
        raise ConfigError(*problems)
    return shape
