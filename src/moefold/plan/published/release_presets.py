"""What a release's own presets say of runs whose table prints the layout alone.

Megatron-Bridge publishes tables of throughput beside the presets that made them. A collection has most flags from
there; where it has none, the presets of the tag were read here: `scripts/performance` of v0.1.0rc4 and of the commit of
the table (25.09), of v0.2.0 (25.11), v0.3.0 (26.02) and v0.3.1 (26.02.01). A record's own flags win over these.

One row of 26.02.01 still has the layout of the release before, while its preset and the rows of the next releases have
another: that row is read, and left out of fits, with theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

_GRAPHED = {"cuda_graph_impl": "transformer_engine"}
_PARTS = {**_GRAPHED, "cuda_graph_scope": ["attn", "moe_router", "moe_preprocess"]}
_ROUTING = {**_GRAPHED, "cuda_graph_scope": ["moe_router", "moe_preprocess"]}
_EAGER = {"cuda_graph_impl": "none"}

# By the release, the model and the GPU.
_FLAGS: Mapping[tuple[str, str, str], Mapping[str, object]] = {
    ("25.09", "deepseek_v3", "GB200"): {**_EAGER, "dispatcher": "alltoall", "recompute": ["mla_up_proj"]},
    ("25.09", "deepseek_v3", "B200"): {**_EAGER, "dispatcher": "alltoall", "recompute": ["mla_up_proj"]},
    ("25.09", "qwen3_235b", "B200"): {**_EAGER, "dispatcher": "alltoall"},
    ("25.09", "qwen3_235b", "H100"): {**_EAGER, "dispatcher": "alltoall"},
    ("25.09", "qwen3_30b", "H100"): {**_EAGER, "dispatcher": "alltoall"},
    ("25.11", "deepseek_v3", "GB300"): {**_PARTS, "dispatcher": "hybridep", "recompute": ["moe_act"]},
    ("25.11", "qwen3_235b", "GB300"): {**_ROUTING, "dispatcher": "hybridep"},
    # Rows with layouts of before its pull request 1348, which brought overlap and graphs.
    ("25.11", "qwen3_235b", "B200"): {**_EAGER, "dispatcher": "alltoall"},
    ("25.11", "qwen3_30b", "H100"): {**_EAGER, "dispatcher": "alltoall"},
    ("26.02.01", "gpt_oss_120b", "B300"): {**_PARTS, "dispatcher": "alltoall"},
    ("26.02.01", "gpt_oss_120b", "B200"): {
        **_EAGER,
        "dispatcher": "alltoall",
        "recompute": ["layernorm", "moe_act"],
    },
    # The row's layout is that of v0.3.0.
    ("26.02.01", "qwen3_235b", "B300"): {**_EAGER, "dispatcher": "alltoall", "ep_overlap": True},
    ("26.02.01", "qwen3_30b", "H100"): {**_EAGER, "dispatcher": "hybridep", "ep_overlap": False},
}
# Rows whose layout is that of an older preset: the layout of theirs, and the leak group of the rows that print it.
_STALE: Mapping[tuple[str, str, str], tuple[Mapping[str, object], str]] = {
    ("26.02.01", "qwen3_30b", "H100"): ({"pp": 1, "vpp": None, "ep": 16, "dp": 16}, "9328925b4d7f"),
}
# Flags without which a record says nothing of how the run was made.
_TELLING = ("dispatcher", "recompute", "cuda_graph_impl", "ep_overlap")


def with_preset(record: Record) -> Record:
    """The record with what its release's preset says, where it says nothing itself."""
    parts, flags = str(record.get("id")).split("-"), record.get("flags") or {}
    if parts[0] != "mb" or any(name in flags for name in _TELLING):
        return record
    key = (parts[1], str(record["model"]["key"]), str((record.get("hardware") or record).get("gpu")))
    made = {**record, "flags": {**_FLAGS.get(key, {}), **flags}}
    if key in _STALE:
        layout, group = _STALE[key]
        made |= {"parallel": {**record["parallel"], **layout}, "leak_group": group}
    return made
