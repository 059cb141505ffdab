"""Kernels that one more layer adds to a step on fake GPUs; in a process of its own (see `run_cases.py`).

    python -m tests.gpu_lab.launches_per_layer

prints one JSON object: launches by recipe and ``kernels.backend``, of one rank of two with experts on both: attention,
MoE layer, FSDP, norm and clipping of gradients, update; forward and backward. A collective counts once.
"""

from __future__ import annotations

import json
import os

from moefold.dryrun.fake_cuda.load_guard import load_guard

RECIPES = ("qwen3_30b_a3b_proxy", "deepseek_v3_proxy", "mixtral_8x7b_proxy")
CHANGES = {"precision.compute": "bfloat16", "kernels.experts": "grouped", "parallel.ep": 2, "data.global_batch": 16}


def main() -> dict[str, dict[str, float]]:
    load_guard()
    from moefold.api.runs import load_run
    from moefold.dryrun.fake_cuda.laboratory import run_rank

    def launches(recipe: str, backend: str, layers: int) -> int:
        changes = CHANGES | {"kernels.backend": backend, "model.num_layers": layers}
        report = run_rank(load_run(recipe, changes), 2, 0, 1)
        assert not report.findings
        return report.num_launches

    def of_a_layer(recipe: str, backend: str) -> float:
        # The first run of a process also makes tables that later ones find.
        _, fewer, more = (launches(recipe, backend, layers) for layers in (3, 3, 4))
        # Two steps are run; the first also makes the optimizer's state.
        return (more - fewer) / 2

    return {recipe: {name: of_a_layer(recipe, name) for name in ("torch", "triton")} for recipe in RECIPES}


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
    # torch's threads for backward passes on eight devices do not end by themselves.
    os._exit(0)
