"""Bytes that a rank passes to collectives, added up by operation and group, and how many tokens it has to send."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from moefold.config.run import RunConfig
from moefold.topology.folded_layout import FoldedLayout

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}

# Parts of the ep group; callers count them only where they have more than one rank.
_LEVELS = ("ep_across", "ep_inside")

Key = tuple[str, str]


@dataclass
class Tally:
    """Calls and bytes by operation and group; groups of one rank send nothing."""

    layout: FoldedLayout
    calls: Counter[Key] = field(default_factory=Counter)
    sizes: Counter[Key] = field(default_factory=Counter)

    def add(self, name: str, group: str, size: int, count: int = 1) -> None:
        """``count`` times ``size`` bytes."""
        axis = "cp" if group.startswith("context_") else group
        if count and (axis in _LEVELS or self.layout.size(axis) > 1):
            self.calls[name, group] += count
            self.sizes[name, group] += size * count


class Tokens(NamedTuple):
    """Tokens of a microbatch on this rank and in its context shard, and bytes of an entry as sent and as reduced."""

    mine: int
    shared: int
    word: int
    wide: int


def tokens_of(run: RunConfig, layout: FoldedLayout) -> Tokens:
    tokens = run.data.micro_batch * run.data.seq_len
    shared = tokens // layout.size("cp")
    word = _BYTES[run.precision.compute]
    return Tokens(shared // layout.size("tp"), shared, word, max(4, word))
