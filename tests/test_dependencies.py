"""What is installed, and from what: the lock covers what pyproject names, files have hashes, and the SBOM is whole."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from importlib.metadata import Distribution, version
from pathlib import Path

import pytest

from benchmarks.lock import LOCK, normalized, read_lock, with_wheels
from benchmarks.sbom import changed_files, document, installed, main

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
HASH = re.compile(r"[0-9a-f]{64}")


def names(requirements: list[str]) -> set[str]:
    """Names of requirements; those of our own extras are looked up."""
    found: set[str] = set()
    for each in requirements:
        name = normalized(re.split(r"[^\w.-]", each, maxsplit=1)[0])
        extras = re.search(r"\[(.*?)\]", each)
        if name == "moefold" and extras:
            for extra in extras[1].split(","):
                found |= names(PYPROJECT["project"]["optional-dependencies"][extra])
        else:
            found.add(name)
    return found


def test_the_lock_has_every_package_that_ci_needs_with_hashes() -> None:
    wanted = names(
        PYPROJECT["project"]["dependencies"]
        + PYPROJECT["project"]["optional-dependencies"]["dev"]
        + PYPROJECT["build-system"]["requires"]
    )
    locked = read_lock()
    missing = wanted - set(locked)
    assert not missing, f"{missing} are not in requirements.lock: run `python -m benchmarks.lock`"
    assert all(hashes for _, hashes in locked.values())
    # Builds of torch: those of the public index and the one without CUDA.
    assert len(locked["torch"][1]) > 2


def test_the_lock_names_no_index_and_no_path() -> None:
    lines = [line for line in LOCK.read_text("utf-8").splitlines() if not line.startswith("#")]
    allowed = re.compile(r"[a-z0-9][\w.-]*==[\w.+!-]+( ; [^/]*)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?")
    assert not [line for line in lines if not allowed.fullmatch(line)]


def test_tools_that_judge_the_code_have_the_locked_versions() -> None:
    """They decide whether a change passes. A developer's other packages may be newer, CI's are those of the lock."""
    locked = read_lock()
    for name in ("ruff", "mypy", "import-linter", "pytest", "torch"):
        assert version(name).partition("+")[0] == locked[name][0], f"{name}: pip install {name}=={locked[name][0]}"


def test_ci_installs_by_hash_and_writes_an_sbom_that_git_ignores() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert "--require-hashes --no-deps -r requirements.lock" in script and "benchmarks.sbom" in script
    assert "build/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_workflows_pin_actions_and_have_a_read_only_token() -> None:
    """There are none yet; one that is added must follow these rules."""
    for path in (ROOT / ".github").glob("workflows/*"):
        text = path.read_text("utf-8")
        assert not [
            use for use in re.findall(r"uses:\s*(\S+)", text) if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", use)
        ]
        assert re.search(r"(?m)^permissions:\s*(read-all|\n\s+contents: read)", text), f"{path}: no read-only token"
        assert "pull_request_target" not in text


def test_a_wheel_s_hash_is_added_to_its_package(tmp_path: Path) -> None:
    wheel = tmp_path / "some_pkg-1.0+cpu-py3-none-any.whl"
    wheel.write_bytes(b"abc")
    text = with_wheels(f"some-pkg==1.0 \\\n    --hash=sha256:{'0' * 64}\n", [wheel])
    (tmp_path / "lock").write_text(text)
    ((found, hashes),) = read_lock(tmp_path / "lock").values()
    assert found == "1.0" and len(hashes) == 2 and hashes[0].startswith("ba7816bf")
    with pytest.raises(SystemExit, match="no package"):
        with_wheels("other==1 \\\n", [wheel])


def test_the_sbom_has_the_shape_of_cyclonedx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "made" / "sbom.json"
    monkeypatch.setattr("sys.argv", ["sbom", "--out", str(out)])
    assert main() == 0
    made = json.loads(out.read_text("utf-8"))
    assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", made["serialNumber"])
    assert made["metadata"]["component"]["name"] == "moefold"
    refs = [each["bom-ref"] for each in made["components"]]
    assert len(refs) == len(set(refs)) == len(installed()) - ("moefold" in {package.name for package in installed()})
    for each in made["components"]:
        assert each["type"] == "library" and each["purl"] == each["bom-ref"]
        assert re.fullmatch(r"pkg:pypi/[a-z0-9-]+@[^/@]+", each["purl"])
        assert all(one["alg"] == "SHA-256" and HASH.fullmatch(one["content"]) for one in each.get("hashes", []))
        assert all(("expression" in one) != ("license" in one) for one in each.get("licenses", []))
    torch = next(each for each in made["components"] if each["name"] == "torch")
    assert torch["version"] == version("torch") and torch["hashes"] and torch["licenses"]
    known = {made["metadata"]["component"]["bom-ref"], *refs}
    assert {one for each in made["dependencies"] for one in [each["ref"], *each["dependsOn"]]} <= known
    depends = next(each["dependsOn"] for each in made["dependencies"] if each["ref"] == torch["bom-ref"])
    assert any(each.startswith("pkg:pypi/sympy@") for each in depends)
    assert str(ROOT) not in out.read_text("utf-8") and document(installed()) == made


def test_a_changed_file_of_a_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_bytes(b"x = 1\n")
    info = tmp_path / "mod-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mod\nVersion: 1.0\n")
    (package,) = installed([Distribution.at(info)])
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"mod.py,sha256={digest},6\ngone.py,sha256={digest},6\nmod-1.0.dist-info/RECORD,,\n")
    assert list(changed_files(package)) == ["gone.py"] and package.purl == "pkg:pypi/mod@1.0"
    (tmp_path / "mod.py").write_bytes(b"x = 2\n")
    assert list(changed_files(package)) == ["mod.py", "gone.py"]
