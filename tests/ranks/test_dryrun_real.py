"""A dry run and a real step of the same rank: equal to the byte, and every collective too."""

from __future__ import annotations

from typing import Any

import pytest
from tests.dry_runs import balanced_run, comparable, on_real_ranks

from moefold.dryrun.dry_run import dry_run

RECOMPUTED = "memory.recompute=[attention, experts]"
BF16 = "precision.compute=bfloat16"
# Four stages over two ranks.
VIRTUAL = ("model.num_layers=4", "parallel.pp=2", "parallel.vpp=2", "data.global_batch=16")
MXFP8 = ("precision.recipe=mxfp8", "memory.retain.rows=quantize", "kernels.casts=native")

CASES = {
    "one rank": (1, "debug_tiny"),
    "sharded": (2, "debug_tiny"),
    "experts and shards": (4, "debug_tiny", "parallel.ep=2"),
    "replicated shards": (4, "debug_tiny", "parallel.ep=2", "parallel.dp_replicate=2"),
    "split experts": (4, "debug_tiny", "parallel.ep=2", "parallel.etp=2"),
    "all-gather": (4, "debug_tiny", "parallel.ep=2", "parallel.etp=2", "parallel.dispatcher=all_gather"),
    "deduplicated": (4, "debug_tiny", "parallel.ep=4", "parallel.dispatcher=deduplicated"),
    "deduplicated, split": (4, "debug_tiny", "parallel.ep=2", "parallel.etp=2", "parallel.dispatcher=deduplicated"),
    "two levels": (4, "debug_tiny", "parallel.ep=4", "parallel.dispatcher=two_level", "parallel.ep_inner=2"),
    "ring": (2, "debug_tiny", "parallel.cp=2", RECOMPUTED),
    "ulysses": (2, "debug_tiny", "parallel.cp=2", "parallel.context.full=all_to_all"),
    "latent attention": (4, "deepseek_v3_proxy", "parallel.tp=2", "parallel.ep=4", BF16),
    "recomputed": (4, "deepseek_v3_proxy", "parallel.pp=2", "parallel.ep=2", BF16, RECOMPUTED),
    "dense": (4, "debug_tiny", "parallel.tp=2", "parallel.pp=2", "model.moe=null"),
    "interleaved": (4, "debug_tiny", *VIRTUAL, "parallel.schedule=interleaved", "parallel.ep=2", BF16),
    "zero bubble": (2, "debug_tiny", "parallel.pp=2", "parallel.schedule=zb_h1"),
    "overlapped": (4, "debug_tiny", *VIRTUAL, "parallel.schedule=dualpipe_v", "parallel.ep=2"),
    "narrow": (4, "debug_mla", "parallel.pp=2", "parallel.ep=2", "parallel.sharding=flat", BF16, *MXFP8),
    "narrow, casts in torch": (2, "debug_mla", "parallel.ep=2", BF16, *MXFP8, "kernels.casts=torch"),
    "MTP module": (2, "debug_mla", "parallel.pp=2", "model.num_mtp=1", BF16),
}
# What `make check` tries, and what CI tries beside it; the others are for the nightly run.
ALWAYS, IN_CI = (
    ("sharded",),
    ("experts and shards", "two levels", "latent attention", "recomputed", "interleaved", "narrow"),
)


def marks(name: str) -> Any:
    return () if name in ALWAYS else pytest.mark.slow if name in IN_CI else pytest.mark.nightly


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_fake_and_real_agree_to_the_byte(name: str) -> None:
    world, recipe, *changes = CASES[name]
    # As a GPU would: no exchange through shared memory, and no matmul in another dtype where a CPU lacks instructions.
    run = balanced_run(recipe, *changes, "parallel.cpu_exchange=gloo", "kernels.cpu_matmul=compute")
    real = on_real_ranks(run, world)
    for rank in sorted({0, world - 1}):
        assert comparable(dry_run(run, world, rank, real[rank]["microbatches"])) == real[rank]
