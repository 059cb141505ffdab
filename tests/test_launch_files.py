"""Files of `examples/launch/`: their syntax, their fields, and the commands that they really run.

Scripts are executed by bash with stand-ins for torchrun, srun and moefold that record how they were called. What they
recorded is then parsed by torchrun's own parser and by moefold's, and every run is checked for its world.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from moefold.checks.run_all import problems_to_train
from moefold.cli.main import parser_of
from moefold.comm.launchers import LAUNCHERS
from moefold.config.loading import override
from moefold.config.strict import read_yaml
from moefold.recipes.catalog import recipe

LAUNCH = Path(__file__).parents[1] / "examples" / "launch"
PAGE = LAUNCH.parents[1] / "docs" / "first-day-on-gpus.md"
SCRIPTS = ("one_node.sh", "torchrun_nodes.sh", "slurm.sbatch")
# Variables that the launcher of a file sets, and the number of ranks.
NODE = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}
SETTINGS: dict[str, tuple[dict[str, str], int]] = {
    "one_node.sh": ({}, 8),
    "torchrun_nodes.sh": ({"HEAD": "host0", "NODES": "2", "NODE_RANK": "1"}, 16),
    "slurm.sbatch": ({"SLURM_NNODES": "2", "SLURM_NTASKS": "16"}, 16),
    "pytorchjob.yaml": ({"RANK": "1", "MASTER_ADDR": "moefold-master-0", "MASTER_PORT": "23456"}, 16),
    "skypilot.yaml": (NODE | {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "RUN": "debug_small"}, 16),
}
STAND_IN = """#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as out:
    out.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


def read(name: str) -> Any:
    """Strictly: keys once, no aliases, no tags, nothing ambiguous."""
    value, problems = read_yaml((LAUNCH / name).read_text())
    assert not problems, problems
    return value


def commands_of(name: str) -> list[str]:
    """The shell text of a file, each variant of it."""
    if name in SCRIPTS:
        return [(LAUNCH / name).read_text()]
    if name == "skypilot.yaml":
        return [read(name)["run"]]
    replicas = read(name)["spec"]["pytorchReplicaSpecs"].values()
    return [replica["template"]["spec"]["containers"][0]["args"][0] for replica in replicas]


def calls(text: str, variables: dict[str, str], folder: Path) -> list[list[str]]:
    """How the stand-ins were called."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("torchrun", "srun", "moefold"):
        (tools / name).write_text(STAND_IN.format(python=sys.executable))
        (tools / name).chmod(0o755)
    environment = variables | {"PATH": f"{tools}:/usr/bin:/bin", "CALLS": str(folder / "calls")}
    done = subprocess.run(
        ["bash", "-c", text], env=environment, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def moefold_words(call: list[str]) -> tuple[list[str], int | None]:
    """(words after `moefold`, ranks that were started or None)."""
    if call[0] == "moefold":
        return call[1:], None
    if call[0] == "srun":
        assert call[1] == "moefold"
        return call[2:], 16
    args = get_args_parser().parse_args(call[1:])
    assert args.module and args.training_script == "moefold.cli.main"
    return args.training_script_args, int(args.nnodes.split(":")[-1]) * int(args.nproc_per_node)


def test_every_file_is_tested() -> None:
    assert sorted(path.name for path in LAUNCH.iterdir()) == sorted(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_started_is_accepted(name: str, tmp_path: Path) -> None:
    variables, world = SETTINGS[name]
    for number, text in enumerate(commands_of(name)):
        (folder := tmp_path / str(number)).mkdir()
        seen = []
        for call in calls(text, variables, folder):
            words, ranks = moefold_words(call)
            args = parser_of([words[0]]).parse_args(words)
            seen.append(words[0])
            assert ranks in (None, world)
            if words[0] in ("train", "prove"):
                run = override(recipe(args.name), args.changes)
                assert args.device == "cuda" and ranks == world
                assert words[0] == "prove" or not problems_to_train(run, world)
        assert [verb for verb in seen if verb != "bench"][-3:] in (
            ["doctor", "prove", "train"],
            ["prove", "prove", "train"],
        )


@pytest.mark.parametrize("name", SETTINGS)
def test_shell_is_well_formed(name: str, tmp_path: Path) -> None:
    for text in commands_of(name):
        (script := tmp_path / "script.sh").write_text(text)
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "set -euo pipefail" in text
        if (shellcheck := shutil.which("shellcheck")) is not None:
            done = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


def test_a_variable_that_is_missing_stops_a_script(tmp_path: Path) -> None:
    text = (LAUNCH / "torchrun_nodes.sh").read_text()
    with pytest.raises(AssertionError, match="NODES"):
        calls(text, {"HEAD": "host0", "NODE_RANK": "0"}, tmp_path)


def test_sbatch_lines_are_options_of_sbatch() -> None:
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    assert len(lines) == (LAUNCH / "slurm.sbatch").read_text().count("#SBATCH")
    given = dict(lines)
    assert given.keys() <= {
        *(
            "job-name",
            "nodes",
            "ntasks-per-node",
            "gpus-per-node",
            "cpus-per-task",
            "time",
            "signal",
            "requeue",
            "open-mode",
            "output",
        )
    }
    # srun's tasks find their ranks by variables that moefold reads.
    assert given["ntasks-per-node"] == given["gpus-per-node"] == "8"
    assert any(launcher.name == "srun" for launcher in LAUNCHERS)


def test_a_job_that_was_interrupted_is_queued_again() -> None:
    """And one that failed or was cancelled is not; tests/ranks/test_slurm.py preempts a real job."""
    requeue = ["scontrol requeue 7"]
    for code, state, asked in (
        (75, "RUNNING", requeue),
        (75, "COMPLETING", []),
        (2, "RUNNING", []),
        (0, "RUNNING", []),
    ):
        text = f"srun() {{ [ $2 != train ] || return {code}; }}; squeue() {{ echo {state}; }}\n"
        text += "scontrol() { echo scontrol $*; }\n" + (LAUNCH / "slurm.sbatch").read_text()
        done = subprocess.run(
            ["bash", "-c", text],
            env={"PATH": "/usr/bin:/bin", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout.splitlines()) == (code, asked), done.stderr


# ---- fields: (needed, allowed) by place ----

PYTORCHJOB = {
    "": ({"apiVersion", "kind", "metadata", "spec"}, {"status"}),
    "metadata": ({"name"}, {"namespace", "labels", "annotations"}),
    "spec": ({"pytorchReplicaSpecs"}, {"elasticPolicy", "runPolicy", "nprocPerNode"}),
    "spec.runPolicy": (
        set(),
        {*("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy")}
        | {"suspend", "managedBy"},
    ),
    "replica": ({"template"}, {"replicas", "restartPolicy"}),
    "pod": ({"containers"}, {"volumes", "nodeSelector", "tolerations", "hostNetwork", "serviceAccountName"}),
    "container": ({"name", "image"}, {"command", "args", "env", "resources", "volumeMounts", "securityContext"}),
}
SKYPILOT = {
    *(
        "name",
        "workdir",
        "num_nodes",
        "resources",
        "envs",
        "secrets",
        "file_mounts",
        "volumes",
        "setup",
        "run",
        "config",
    )
}
RESOURCES = {
    *("infra", "accelerators", "accelerator_args", "cpus", "memory", "instance_type", "use_spot", "disk_size"),
    *("disk_tier", "network_tier", "image_id", "ports", "labels", "autostop", "any_of", "ordered", "job_recovery"),
}


def has_fields(place: str, data: dict[str, Any]) -> bool:
    needed, more = PYTORCHJOB[place]
    return needed <= data.keys() <= needed | more


def test_the_job_has_the_fields_of_a_pytorchjob() -> None:
    data = read("pytorchjob.yaml")
    assert has_fields("", data) and (data["apiVersion"], data["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert has_fields("metadata", data["metadata"]) and re.fullmatch(
        r"[a-z]([-a-z0-9]*[a-z0-9])?", data["metadata"]["name"]
    )
    assert has_fields("spec", data["spec"]) and has_fields("spec.runPolicy", data["spec"]["runPolicy"])
    assert data["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    replicas = data["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        assert has_fields("replica", replica)
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = replica["template"]["spec"]
        assert has_fields("pod", pod)
        (container,) = pod["containers"]
        # The operator looks for a container of this name.
        assert has_fields("container", container) and container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    # Both start the same command; only RANK tells them apart.
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert f"--nnodes {sum(replica['replicas'] for replica in replicas.values())} " in commands_of("pytorchjob.yaml")[0]


def test_the_task_has_the_fields_of_skypilot() -> None:
    data = read("skypilot.yaml")
    assert data.keys() <= SKYPILOT and data["resources"].keys() <= RESOURCES
    assert isinstance(data["num_nodes"], int) and re.fullmatch(r"[\w-]+:\d+", data["resources"]["accelerators"])
    assert set(re.findall(r"SKYPILOT_\w+", data["run"])) == {
        *("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_GPUS_PER_NODE")
    }


def test_commands_of_the_page_are_accepted() -> None:
    """Those that torchrun starts; `tests/architecture/test_commands.py` has the others."""
    text = re.sub(r"\\\n\s*", "", PAGE.read_text())
    found = re.findall(r"^torchrun .*$", text, re.MULTILINE)
    assert len(found) == 4
    for line in found:
        words, ranks = moefold_words(shlex.split(line))
        args = parser_of([words[0]]).parse_args(words)
        assert ranks == 8
        if words[0] == "train":
            assert not problems_to_train(override(recipe(args.name), args.changes), 8)


def test_every_launch_has_a_fixed_port() -> None:
    """Without one torchrun starts its c10d rendezvous, on one node too, which unpickles what reaches it."""
    root = LAUNCH.parents[1]
    texts = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.*")]
    texts += (root / "src").rglob("*.py")
    found, offenders = 0, []
    for path in texts:
        joined = re.sub(r"\\+\n\s*|\n\s+(?=--)", " ", path.read_text("utf-8"))
        for line in re.findall(r"torchrun --(?!master-addr`).*", joined):
            found += 1
            if "--master-port" not in line or "--standalone" in line or "--rdzv" in line:
                offenders.append(f"{path.name}: {line}")
    assert found >= 15 and not offenders, offenders


def test_the_page_names_every_file() -> None:
    page = PAGE.read_text()
    assert all(f"examples/launch/{name}" in page for name in SETTINGS)
