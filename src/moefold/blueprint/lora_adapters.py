"""LoRA adapters as parameters: which weights have them, what they are called, and their shapes.

A weight [out, in] gets A [rank, in] and B [out, rank], and acts as W + scale * B A (`nn/low_rank.py`). Stacked
dims stay:

    weight                          A                  B
    attention.q.weight [Y, X]       [r, X]             [Y, r]         attention.q.lora_a, attention.q.lora_b
    feed_forward.gate_up [2, F, D]  [2, r, D]          [2, F, r]      gate and up have an A each, as in PEFT
    experts.gate_up [E, 2, F, L]    [E, r, L]          [E, 2, F, r]   an expert's gate and up share one, as in PEFT
    experts.down [E, L, F]          [E, r, F]          [E, L, r]

So A keeps how its weight is cut along the input, B how it is cut along the output (`blueprint/sharding.py`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from moefold.config.model import LoraConfig

AdapterKind = Literal["lora_a", "lora_b"]
# Kinds of weights that can have adapters.
ADAPTED_KINDS = ("matrix", "expert")
# Modules that hold them: layers, and those of MTP modules.
_HOLDERS = ("layers.", "mtp.")


class Adapter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: AdapterKind


def adapters_of(name: str, shape: tuple[int, ...], kind: str, lora: LoraConfig | None) -> tuple[Adapter, ...]:
    """A and B of a weight; nothing for a weight that has none."""
    if lora is None or not can_have_adapter(name, kind) or not _is_target(name, lora):
        return ()
    *outer, inner = shape
    above = outer[:1] if kind == "expert" else outer[:-1]
    return (
        Adapter(adapter_name(name, "lora_a"), (*above, lora.rank, inner), "lora_a"),
        Adapter(adapter_name(name, "lora_b"), (*outer, lora.rank), "lora_b"),
    )


def adapter_name(weight: str, kind: AdapterKind) -> str:
    """
    >>> adapter_name("layers.0.attention.q.weight", "lora_a"), adapter_name("layers.0.feed_forward.down", "lora_b")
    ('layers.0.attention.q.lora_a', 'layers.0.feed_forward.down_lora_b')
    """
    return f"{weight.removesuffix('weight')}{kind}" if weight.endswith(".weight") else f"{weight}_{kind}"


def weight_of(adapter: str) -> str:
    """The inverse of `adapter_name`."""
    base = adapter[: -len("lora_a")]
    return f"{base}weight" if base.endswith(".") else base.removesuffix("_")


def is_adapter(name: str) -> bool:
    return name.endswith(("lora_a", "lora_b"))


def can_have_adapter(name: str, kind: str) -> bool:
    return kind in ADAPTED_KINDS and name.startswith(_HOLDERS)


def _is_target(name: str, lora: LoraConfig) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in lora.targets)
