"""`moefold plan` as a user meets it: the report, JSON, pinned choices, and errors that help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.cli.main import main

SRC = Path(__file__).parents[2] / "src"
Output = pytest.CaptureFixture[str]
SMALL = ["plan", "olmoe_1b_7b", "--gpu", "H100", "--gpus", "16", "--global-batch", "256"]
PINNED = [*SMALL, "--fix", "tp=1,cp=1,pp=1,2,vpp=1,2,ep=8,etp=1,sequences=1,replicate=1"]
ASK_AND_LOOK = """
import sys
from moefold.cli.main import main
code = main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""


def test_the_report_says_all_that_matters(capsys: Output) -> None:
    assert main(PINNED) == 0
    said = capsys.readouterr()
    told = " ".join(said.out.split())
    for words in (
        "olmoe_1b_7b on 16 H100",
        "80 % interval",
        "chosen",
        "your own",
        "what if",
        "the network were twice as fast",
        "binds:",
        "Goodput: at one failure per 50,000 GPU hours",
        "torchrun --nnodes 2",
        "train olmoe_1b_7b",
        "--data.global_batch 256",
        "--data.train $DATA",
    ):
        assert words in told, words
    assert "grids: " in said.err, "progress goes to stderr"


def test_json_is_data_and_the_choice_obeys_what_was_pinned(capsys: Output) -> None:
    assert main([*PINNED, "--json", "--tokens", "5T", "--mtbf-hours", "1000"]) == 0
    data = json.loads(capsys.readouterr().out)
    layout = data["chosen"]["layout"]
    assert (layout["tp"], layout["ep"], layout["micro_batch"], layout["global_batch"]) == (1, 8, 1, 256)
    assert data["chosen"]["fits"] and data["chosen"]["step_seconds"] <= data["own"]["step_seconds"]
    assert sum(line["seconds"] - line["hidden"] for line in data["chosen"]["time"]) == pytest.approx(
        data["chosen"]["step_seconds"]
    )
    assert sum(line["bytes"] for line in data["chosen"]["memory"]) == pytest.approx(data["chosen"]["memory_bytes"])
    assert data["pareto"][0]["step_seconds"] == data["chosen"]["step_seconds"]
    assert data["goodput"]["failures_per_day"] == pytest.approx(24 * 16 / 1000)
    assert data["goodput"]["days"] > 0 and data["goodput"]["tokens"] == 5e12
    assert data["would_free"] and all(each["bytes"] > 0 and each["slower"] > -0.5 for each in data["would_free"])
    assert {answer["about"] for answer in data["what_if"]} == {"machine", "layout", "framework"}


def test_a_launch_asks_for_what_the_run_does_not_say(capsys: Output) -> None:
    """Published schedules are in recipes; where none was published, lr and steps are the user's to say."""
    assert main([*SMALL, "--no-search", "--json"]) == 0
    words = json.loads(capsys.readouterr().out)["command"]
    assert "--data.train $DATA" in words and "$STEPS" not in words and "$LR" not in words
    unpublished = ["plan", "qwen3_30b_a3b", "--gpu", "H100", "--gpus", "16", "--no-search", "--json"]
    main([*unpublished, "--parallel.ep", "8"])
    words = json.loads(capsys.readouterr().out)["command"]
    assert "--data.train $DATA --train.steps $STEPS --optim.lr $LR" in words
    main([*unpublished, "--parallel.ep", "8", "--train.steps", "100", "--optim.lr", "1e-4"])
    words = json.loads(capsys.readouterr().out)["command"]
    assert "$STEPS" not in words and "$LR" not in words and "--train.steps 100" in words


def test_where_nothing_fits_the_answer_says_how_many_gpus_would(capsys: Output) -> None:
    pinned = "tp=1,cp=1,sequences=1,dispatcher=all_to_all"
    assert main(["plan", "mixtral_8x7b", "--gpu", "H100", "--gpus", "4", "--fit", "24GiB", "--fix", pinned]) == 2
    said = capsys.readouterr().err
    assert "nothing fits" in said and "32 GPUs would be enough" in said


def test_without_a_search_the_runs_own_layout_is_predicted(capsys: Output) -> None:
    assert main([*SMALL, "--no-search", "--json", "--parallel.ep", "4", "--data.train", "tokens"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["chosen"]["layout"]["ep"] == 4 and data["searched"] is None
    assert "--parallel.ep 4" in data["command"] and "--parallel.tp" not in data["command"]
    assert "--data.train tokens" in data["command"] and "$DATA" not in data["command"]


@pytest.mark.parametrize(
    ("gpu", "recipe", "bits", "peak"),
    [
        ("H100", "null", 16, 989),
        ("H100", "fp8_tensor", 8, 1979),
        ("GB200", "nvfp4", 4, 9800),
        ("A100", "null", 16, 312),
    ],
)
def test_mfu_is_of_the_units_that_matmuls_run_on_and_says_so(
    gpu: str, recipe: str, bits: int, peak: int, capsys: Output
) -> None:
    words = ["plan", "olmoe_1b_7b", "--gpu", gpu, "--gpus", "16", "--no-search", "--precision.recipe", recipe]
    main([*words, "--json"])
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert chosen["mfu_peak"] == {"bits": bits, "tflops": peak}
    assert chosen["mfu"] == pytest.approx(chosen["tflops_per_gpu"] / peak)
    main(words)
    unit = "bfloat16" if bits == 16 else f"{bits} bits"
    assert f"MFU {chosen['mfu']:.1%} of {peak:,.0f} in {unit}" in " ".join(capsys.readouterr().out.split())


def test_a_layout_that_cannot_be_is_explained_and_the_search_goes_on(capsys: Output) -> None:
    assert main([*PINNED, "--json", "--parallel.tp", "32"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["own"] is None and "does not divide the world of 16" in data["own_problem"]
    assert main([*SMALL, "--no-search", "--parallel.tp", "32"]) == 2
    assert "does not divide the world of 16" in capsys.readouterr().err


def test_what_moefold_cannot_start_is_said(capsys: Output) -> None:
    assert main([*PINNED, "--framework", "megatron", "--fix", "tp=1,pp=1,ep=8,sequences=1,dispatcher=hybridep"]) == 0
    # Lines are folded at the terminal's width.
    said = " ".join(capsys.readouterr().out.split())
    assert "moefold does not have yet: the hybridep dispatcher" in said and "nearest run that it can start" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan"], "no RUN given"),
        (["plan", "olmoe_1b_7b"], "give --gpus 1024"),
        (["plan", "olmo", "--gpus", "8"], "no recipe named 'olmo'"),
        ([*SMALL, "--gpu", "H10"], "no gpu named 'H10'"),
        ([*SMALL, "--domain", "0", "--nic", "-1"], "nic: is -1"),
        ([*SMALL, "--fix", "ep=7"], "no legal layout: 64 experts do not divide over ep"),
        ([*SMALL, "--headroom", "2"], "use a fraction"),
        ([*SMALL, "--mtbf-hours", "-3"], "mtbf-hours: is -3"),
        ([*SMALL, "--mtbf-hours", "0"], "mtbf-hours: is 0"),
        (["plan", "deepseek_v3", "--gpus", "8", "--global-batch", "64"], "nothing fits: "),
    ],
)
def test_wrong_questions_get_helpful_answers(words: list[str], expected: str, capsys: Output) -> None:
    assert main(words) == 2
    assert expected in capsys.readouterr().err


def test_plans_are_made_without_torch() -> None:
    command = [sys.executable, "-c", ASK_AND_LOOK, *PINNED]
    done = subprocess.run(command, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False", "torch was imported"
