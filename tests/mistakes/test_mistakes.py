"""Mistakes on purpose: what is answered is text that people have read, so a change of it is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.mistakes.answers import GOLDEN, answer, prepare
from tests.mistakes.mistakes import MISTAKES, Mistake

REVIEWED = {text.splitlines()[0][2:]: text for text in GOLDEN.read_text().split("\n\n") if text.startswith("# ")}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("prepared"))


def test_the_list() -> None:
    names = [mistake.name for mistake in MISTAKES]
    assert len(set(names)) == len(names) >= 60
    assert list(REVIEWED) == names, "write the file again: python -m tests.mistakes.answers tests/mistakes/answers.txt"


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name.replace(" ", "_") for mistake in MISTAKES])
def test_the_answer_is_the_reviewed_one(mistake: Mistake, tmp_path: Path, prepared: Path) -> None:
    assert answer(mistake, tmp_path, prepared).strip() == REVIEWED[mistake.name].strip()


def test_no_answer_is_a_traceback_or_a_success() -> None:
    for name, text in REVIEWED.items():
        assert "Traceback" not in text and "[exit 0]" not in text, name
        assert "Errno" not in text and "/tmp" not in text and "/work" not in text, name


def test_ctrl_c_before_anything_has_happened(tmp_path: Path) -> None:
    """However early it comes after the start of Python: one line, 130, and no traceback."""
    command = [sys.executable, "-m", "moefold.cli.main", "plan", "deepseek_v3", "--gpus", "2048"]
    # Shells let jobs in the background ignore SIGINT, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    for _ in range(600):
        with open(f"/proc/{started.pid}/maps") as maps:
            if "yaml" in maps.read():
                break
        time.sleep(0.02)
    os.kill(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=60)
    # Where the signal meets an `exec` of the standard library (dataclasses), Python ends itself by SIGINT after all: a
    # shell shows 130 for both.
    assert started.returncode in (130, -signal.SIGINT) and said.splitlines()[-1] == "moefold: interrupted", said
    assert "Traceback" not in said


def test_ctrl_c_in_a_callback_of_the_interpreter() -> None:
    """Python drops what is raised in a weak reference's callback, such as an import lock's, and would go on."""
    program = """
import os, signal, sys, time, weakref
from moefold.cli import main

class Lock: ...

def wait(words, stop):
    lock = Lock()
    reference = weakref.ref(lock, lambda _: os.kill(os.getpid(), signal.SIGINT) or time.sleep(0.1))
    del lock
    time.sleep(20)
    return 0

main._dispatch = wait
sys.exit(main.main())
"""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.returncode, ended.stderr) == (130, "moefold: interrupted\n")
