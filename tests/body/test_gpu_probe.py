"""`moefold doctor --gpus`: link matrix, adapters, slow settings, and what is missing.

Output and files are written by hand in the formats of nvidia-smi and sysfs; no GPU was asked.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.ops.gpu_probe import SLOW_SETTINGS, parse_topology, probe_gpus, read_adapters, slow_settings
from moefold.ops.host_probe import GpuInfo, HostInfo, probe_host

# Four GPUs in two pairs, one adapter near the first pair, one at the other socket; the head is underlined.
MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tSYS\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPIX\tPXB\tSYS\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
SWITCHED = (
    "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X \tNV18\tNV18\t0\nGPU1\tNV18\t X \tNV18\t0\nGPU2\tNV18\tNV18\t X \t0\n"
)


@pytest.fixture
def host() -> HostInfo:
    gpu = GpuInfo("NVIDIA H100", (9, 0), 80 << 30)
    return dataclasses.replace(probe_host(), gpus=(gpu,) * 4, cuda="13.0", nccl=True)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "class" / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        for file, text in (("rate", "400 Gb/sec (4X NDR)"), ("state", state), ("link_layer", "InfiniBand")):
            (port / file).write_text(text + "\n")
    return tmp_path


@pytest.fixture
def smi(host: HostInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that knows two questions."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "matrix").write_text(MATRIX)
    script = folder / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\n"
        f'case "$1" in topo) cat {folder}/matrix ;; --query-gpu=driver_version) printf "580.65.06\\n580.65.06\\n" ;; '
        "*) exit 9 ;; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda first, second: second < 3)


def test_a_matrix_becomes_domains_and_nearest_adapters() -> None:
    found = parse_topology(MATRIX)
    assert found is not None
    assert found.gpus == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert found.nvlink_domains == [["GPU0", "GPU1"], ["GPU2", "GPU3"]]
    assert [found.nearest_adapter(gpu) for gpu in found.gpus] == [
        ("NIC0", "PIX"),
        ("NIC0", "PXB"),
        ("NIC0", "SYS"),
        ("NIC0", "SYS"),
    ]
    assert found.links["GPU0"] == {"GPU1": "NV12", "GPU2": "SYS", "GPU3": "SYS", "NIC0": "PIX"}


def test_a_switch_makes_one_domain() -> None:
    found = parse_topology(SWITCHED)
    assert found is not None and [sorted(domain) for domain in found.nvlink_domains] == [["GPU0", "GPU1", "GPU2"]]
    assert found.nearest_adapter("GPU0") is None


@pytest.mark.parametrize("text", ["", "No devices were found\n", "Failed to initialize NVML\n"])
def test_no_matrix_is_none(text: str) -> None:
    assert parse_topology(text) is None


@pytest.mark.usefixtures("smi")
def test_a_host_with_faults_is_told_them_all(host: HostInfo, sysfs: Path) -> None:
    report = probe_gpus(host, {"NCCL_IB_DISABLE": "1"}, sysfs)
    assert report.driver == "580.65.06" and not [found for found in report.missing if found.what != "torch with CUDA"]
    assert (report.adapters[0].name, report.adapters[0].rate) == ("mlx5_0", "400 Gb/sec (4X NDR)")
    whys = {found.what: found.why for found in report.warnings}
    assert whys.keys() == {"NCCL_IB_DISABLE=1", "mlx5_1", "GPUDirect", "NVLink", "adapters", "P2P"}
    assert whys["NVLink"] == "NVLink connects 2 of 4 GPUs of this host"
    assert whys["adapters"].startswith("GPU2, GPU3:") and whys["P2P"] == "GPU 0 cannot read the memory of GPU 3"
    (sysfs / "module" / "nvidia_peermem").mkdir(parents=True)
    assert "GPUDirect" not in {found.what for found in probe_gpus(host, {}, sysfs).warnings}


def test_adapters_without_files_are_none(tmp_path: Path) -> None:
    assert read_adapters(tmp_path) == ()


@pytest.mark.parametrize("row", SLOW_SETTINGS, ids=lambda row: row.name)
def test_every_slow_setting_is_noticed(row: object) -> None:
    name, values = row.name, row.values  # type: ignore[attr-defined]
    (found,) = slow_settings({name: values[0] if values else "Ring"})
    assert found.what.startswith(f"{name}=") and found.why and found.fix
    assert not slow_settings({name: ""})
    if values:
        assert not slow_settings({name: "something else"})


def test_without_gpus_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("moefold.cli.doctor_gpus.probe_host", lambda: dataclasses.replace(probe_host(), gpus=()))
    assert main(["doctor", "--gpus"]) == 1
    printed = capsys.readouterr().out
    assert "nvidia-smi" in printed and "not in PATH" in printed and "torch sees none" in printed
    assert "torchrun --master-port 29500 --nproc-per-node 8 -m moefold.cli.main doctor --gpus" in printed
    assert main(["doctor", "--gpus", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["links"] is None and {"GPU", "nvidia-smi"} <= {each["what"] for each in found["gpus"]["missing"]}
    assert main(["doctor", "--gpus", "--seconds", "0"]) == 2
