"""Shell completion is written from the parsers: every verb and option is in the scripts, and bash proposes them."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from moefold.cli.main import VERBS, main


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    import contextlib
    import io

    found = {}
    for shell in ("bash", "zsh", "fish"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(["completion", shell]) == 0
        found[shell] = out.getvalue()
    return found


def proposals(script: str, *words: str) -> set[str]:
    """What bash would propose for the last of these words."""
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _moefold; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash_proposes_verbs_options_choices_and_recipes(scripts: dict[str, str]) -> None:
    script = scripts["bash"]
    assert set(VERBS) <= proposals(script, "moefold", "")
    assert proposals(script, "moefold", "tr") == {"train"}
    assert proposals(script, "moefold", "train", "--de") == {"--device"}
    assert proposals(script, "moefold", "train", "debug_tiny", "--device", "") == {"cpu", "cuda"}
    assert "qwen3_30b_a3b" in proposals(script, "moefold", "check", "qwen3_30")
    assert proposals(script, "moefold", "convert", "to-h") == {"to-hf"}
    assert proposals(script, "moefold", "convert", "to-hf", "--max") == {"--max-shard"}
    assert proposals(script, "moefold", "completion", "f") == {"fish"}


def test_every_verb_and_option_is_in_every_script(scripts: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["commands"]
    assert {row["path"].split(" ")[0] for row in table} == {"", *VERBS}
    for shell, script in scripts.items():
        for row in table:
            for word in row["words"]:
                spelled = word.removeprefix("--") if shell == "fish" and word.startswith("--") else word
                assert spelled in script or (shell == "fish" and word == "-h"), (shell, word)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_theirs(shell: str, scripts: dict[str, str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=scripts[shell], text=True, check=True)
