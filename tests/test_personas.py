"""One visit per person of the documents, from an empty folder, with the wheel: each script checks its own result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.marks import cpu_seconds

ROOT = Path(__file__).parents[1]
PERSONAS = ROOT / "examples" / "personas"
# The last line of each says how long it took. The student is promised five minutes on two cores: of processor time,
# which does not depend on what else the machine does.
LAST = {
    "student.sh": "student: done in ",
    "node_engineer.sh": "node engineer: done in ",
    "lead_2048.sh": "lead: done in ",
    "researcher.py": "researcher: done in ",
    "rl_engineer.py": "RL engineer: done in ",
    "finetune_chat.sh": "fine-tuning: done in ",
}
STUDENT_SECONDS = 300
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def test_every_persona_is_visited() -> None:
    assert sorted(path.name for path in PERSONAS.iterdir() if path.is_file()) == sorted(LAST)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a shell in which the built wheel is installed; packages that it needs come from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", str(folder / "dist"), str(ROOT)], check=True)
    (wheel,) = (folder / "dist").glob("moefold-*.whl")
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    programs = f"{folder / 'site' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": str(folder / "site"), "PATH": programs, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.every_commit
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LAST)
def test_a_visit(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    program = sys.executable if name.endswith(".py") else "bash"
    started = cpu_seconds()
    done = subprocess.run(
        [program, str(PERSONAS / name)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith(LAST[name])
    print(done.stdout.splitlines()[-1])
    where = [sys.executable, "-c", "import moefold; print(moefold.__file__)"]
    shown = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert not shown.startswith(str(ROOT))
    if name == "student.sh":
        assert cpu_seconds() - started < STUDENT_SECONDS
