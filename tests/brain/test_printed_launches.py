"""Every launch that `moefold plan` prints passes `moefold check` once its placeholders are filled in, and fits.

A few cases on every change; at night all recipes on small, usual and large clusters of two kinds of GPU.
"""

from __future__ import annotations

import json
import shlex

import pytest

from moefold.api.runs import check, load_run
from moefold.cli.main import main
from moefold.hardware.cluster import cluster_of
from moefold.plan.predict import predict
from moefold.plan.workload import workload_of_run
from moefold.recipes.catalog import RECIPES

Output = pytest.CaptureFixture[str]
FILLED = {"$DATA": "tokens", "$STEPS": "1000", "$LR": "1e-4"}
ONE_OF_EACH = "tp=1,cp=1,sequences=1,dispatcher=deduplicated"
FEW = [
    ("debug_mla", "H100", 8, "tp=1,cp=1"),
    ("olmoe_1b_7b", "H100", 8, ONE_OF_EACH),
    ("qwen3_30b_a3b", "GB200", 64, ONE_OF_EACH),
    ("qwen3_30b_a3b+latent_accuracy", "H100", 64, ONE_OF_EACH),
    ("gpt_oss_20b", "B200", 16, ONE_OF_EACH),
    ("mixtral_8x7b", "H100", 4, ONE_OF_EACH),
]
PUBLISHED = [name for name in RECIPES if not name.startswith("debug_") and not name.endswith("_proxy")]
ALL = [
    pytest.param(name, gpu, gpus, "", marks=pytest.mark.nightly)
    for name in PUBLISHED
    for gpu in ("H100", "GB200")
    for gpus in (8, 64, 512, 2048)
]


@pytest.mark.parametrize(("name", "gpu", "gpus", "fix"), [*FEW, *ALL])
@pytest.mark.timeout(900)
def test_a_printed_launch_passes_the_checks_and_fits(name: str, gpu: str, gpus: int, fix: str, capsys: Output) -> None:
    pinned = ["--fix", fix] if fix else []
    code = main(["plan", name, "--gpu", gpu, "--gpus", str(gpus), "--json", *pinned])
    said = capsys.readouterr()
    if code == 2:
        # The only other answer: nothing fits, and how many GPUs would be enough.
        assert "nothing fits" in said.err and "GPUs would be enough" in said.err, said.err
        return
    words = shlex.split(json.loads(said.out)["command"])
    named = words[words.index("train") + 1 :]
    assert named[0] == name
    published = not name.startswith("debug_")
    assert ("$DATA" in named) == published, "whose tokens are trained on is the user's to say"
    assert load_run(name).optim.lr > 0 or "$LR" in named
    filled = [FILLED.get(word, word) for word in named]
    assert main(["check", *filled, "--world", str(gpus), "--json"]) == 0, capsys.readouterr().out
    run = load_run(name, dict(zip([word.removeprefix("--") for word in filled[1::2]], filled[2::2], strict=True)))
    assert check(run, gpus) == []
    assert int(words[words.index("--nproc-per-node") + 1]) * nodes_of(words) == gpus
    found = predict(workload_of_run(run, cluster_of(gpu, gpus))).memory
    assert found.total <= 0.95 * found.capacity


def nodes_of(words: list[str]) -> int:
    return int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
