"""The command line around the brain: quick, without torch, and clear when asked the wrong thing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moefold import __version__
from moefold.cli.main import VERBS, main

SRC = Path(__file__).parents[2] / "src"
LARGE = ["layout", "--world", "16384", "--pp", "16", "--tp", "4", "--cp", "2", "--ep", "64"]
ASK_AND_LOOK = """
import sys
from moefold.cli.main import main
code = main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""


@pytest.mark.timing
def test_sixteen_thousand_ranks_answer_within_a_second_and_without_torch() -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        command = [sys.executable, "-c", ASK_AND_LOOK, *LARGE]
        done = subprocess.run(command, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "False", "torch was imported"
    assert min(seconds) < 1.0, seconds


def test_the_report_names_groups_that_leave_a_domain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LARGE) == 0
    out = capsys.readouterr().out
    assert "16,384 ranks   dp 128   edp 16" in out
    assert "domain of 8:  leave it: dp, pp, ep, edp" in out and "stay inside: tp, cp\n" in out
    table = {line.split()[0]: line for line in out.splitlines() if line}
    assert (
        "none" in table["tp"] and "of 256, over 1 to 2 domains" in table["ep"] and "all, over 8 domains" in table["ep"]
    )


def test_json_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LARGE, "--json", "--rank", "100", "--domain", "4"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["dp"], data["edp"], data["groups"]["tp"]["ranks"]) == (128, 16, [100, 101, 102, 103])
    assert data["groups"]["tp"]["domains"] == [
        {"domain": 4, "num_groups": 4096, "num_leaving": 0, "fewest_domains": 1, "most_domains": 1}
    ]


def test_an_order_puts_another_axis_inside_a_domain(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout", "--world", "64", "--ep", "8", "--domain", "8"]
    assert main(words) == 0
    assert "domain of 8:  leave it: dp, edp" in capsys.readouterr().out
    assert main([*words, "--expert-order", "etp-edp-ep-pp"]) == 0
    out = capsys.readouterr().out
    (summary,) = (line for line in out.splitlines() if line.startswith("domain of 8:"))
    leave, stay = summary.split(";")
    assert " ep," in leave and "edp" not in leave and "edp" in stay


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["layout", "--world", "8", "--dense-order", "tp-pp"], "innermost first: tp-cp-dp-pp, tp-dp-cp-pp"),
        (["layuot"], "did you mean 'layout'?"),
        (["layout", "--world", "8", "--ep", "3"], "choose ep from [1, 2, 4, 8]"),
        (["layout", "--world", "8", "--rank", "8"], "choose from 0 to 7"),
        (["layout", "--world", "8", "--domain", "0"], "use 1 or more"),
        (["layout", "--world", str(10**30)], "at most 10,000,000 can be shown"),
    ],
)
def test_a_wrong_question_gets_one_clear_answer(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert expected in err and "Traceback" not in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out.strip()) == (0, f"moefold {__version__}")


SUBVERBS = {
    "bench": ["calibrate", "layer", "step"],
    "convert": ["to-hf", "from-hf", "to-peft", "upcycle"],
    "data": ["inspect"],
}
COMMANDS = [[verb, *rest] for verb in VERBS for rest in ([], *([sub] for sub in SUBVERBS.get(verb, ())))]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_verb_has_help_with_an_example_and_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"moefold {' '.join(words)} " in text.split("examples:")[-1]
    # A verb with sub-verbs has its options there.
    assert "--json" in text or words[-1] in SUBVERBS


def test_help_lists_every_verb_without_torch() -> None:
    command = [sys.executable, "-c", ASK_AND_LOOK]
    done = subprocess.run(command, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert done.returncode == 2 and all(verb in done.stdout for verb in VERBS)
    assert done.stdout.splitlines()[-1] == "False", "torch was imported"
