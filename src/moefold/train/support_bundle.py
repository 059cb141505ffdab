"""One zip file with what a developer needs to understand a failed run, and with nothing secret.

Its contents are an allow-list (`collect`): versions, the host, the link matrix, settings of NCCL and torch, the run's
configuration, its last metrics, the names and sizes of its checkpoints, reports of hangs (stacks and last collectives
of every rank), and dumps of the flight recorder as JSON. No weights, no tokens, no logs, no other files and no other
variables. Every string passes `redaction.py`. What could not be collected is listed, so that nothing is missing
silently.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moefold import __version__
from moefold.config.loading import load_run_file
from moefold.errors import MoefoldError
from moefold.ops.backends import as_rows
from moefold.ops.gpu_probe import GpuReport, probe_gpus
from moefold.ops.host_probe import HostInfo, probe_host
from moefold.redaction import Redactor
from moefold.train.callbacks.jsonl import FILE_NAME
from moefold.train.fault_tolerance.flight_recorder import dump_files, read_dump

PACKAGES = (
    *("moefold", "torch", "triton", "numpy", "pydantic", "safetensors", "transformers", "tokenizers", "torchao"),
    *(
        "flash-attn",
        "deep-ep",
        "deep-gemm",
        "transformer-engine",
        "liger-kernel",
        "nvidia-nccl-cu12",
        "nvidia-nccl-cu13",
    ),
)
LAST_METRICS = 200
# Of `watchdog.py`, which imports torch.
HANGS, LAST_HANGS = "hangs", 3
HANG_FIELDS = {"what", "kind", "culprits", "sentence", "ranks"}
_STEP = re.compile(r"step_\d+")
# Of a line of metrics.jsonl: its own fields, whatever a later version or a callback adds.
METRIC_FIELDS = {
    *("kind", "time", "step", "steps", "loss", "balance", "grad_norm", "lr", "tokens", "seconds", "dropped", "skipped"),
    *("memory_bytes", "world", "metrics", "load", "speed", "reason", "path", "resumed_from", "parameters", "device"),
    *("active_parameters", "experts", "flops_per_token"),
}


@dataclass
class Bundle:
    """Files by name, and what could not be collected."""

    files: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def collect(
    run_directory: Path | None = None, environment: Mapping[str, str] | None = None, home: str | None = None
) -> Bundle:
    """``run_directory`` is `train.directory/NAME`; without one the bundle is about the machine only."""
    environment = os.environ if environment is None else environment
    redactor = Redactor(environment, str(Path.home()) if home is None else home)
    bundle = Bundle()
    host = probe_host()
    gpus = probe_gpus(host, environment)
    facts: dict[str, object] = {
        "versions.json": _versions(),
        "host.json": _host(host),
        "gpus.json": gpu_facts(gpus),
        "environment.json": redactor.environment(environment),
    }
    for name, value in facts.items():
        bundle.files[name] = _json(redactor.data(value))
    if gpus.topology_text is not None:
        bundle.files["topology.txt"] = redactor.text(gpus.topology_text)
    if run_directory is not None:
        _collect_run(bundle, run_directory, redactor)
    _collect_dumps(bundle, dump_files(environment, run_directory), redactor)
    about = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "moefold": __version__}
    bundle.files["contents.json"] = _json(about | {"files": sorted(bundle.files), "left_out": bundle.left_out})
    return bundle


def write_bundle(bundle: Bundle, path: Path) -> None:
    """A new file that only its owner can read; an existing one is refused."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise MoefoldError(f"{path} exists already; choose another --out") from None
    except OSError as error:
        raise MoefoldError(f"{path}: cannot be written: {error.strerror}; choose another --out") from None
    with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(bundle.files.items()):
            archive.writestr(name, text)


# ---- the machine ----


def _versions() -> dict[str, object]:
    found: dict[str, object] = {"python": sys.version.split()[0], "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"moefold": __version__}


def _host(host: HostInfo) -> dict[str, object]:
    facts = asdict(host) | {"cpu_features": sorted(host.cpu_features)}
    # A path may have a user's name in it.
    facts["compiler"] = None if host.compiler is None else Path(host.compiler).name
    return facts | {"backends": as_rows(host.device, host)}


def gpu_facts(report: GpuReport) -> dict[str, object]:
    """As JSON data, with the domains of NVLink."""
    facts = asdict(report)
    del facts["topology_text"]
    return facts | {"nvlink_domains": [] if report.topology is None else report.topology.nvlink_domains}


# ---- the run ----


def _collect_run(bundle: Bundle, directory: Path, redactor: Redactor) -> None:
    if not directory.is_dir():
        raise MoefoldError(f"{directory} is no directory; name a run's own, such as runs/debug_small")
    if (config := directory / "config.yaml").is_file():
        try:
            # Read strictly and written anew: a comment or an unknown key does not leave the machine.
            bundle.files["run/config.json"] = _json(redactor.data(asdict(load_run_file(config))))
        except MoefoldError as error:
            bundle.left_out.append(redactor.text(f"run/config.yaml: {error}"))
    else:
        bundle.left_out.append("run/config.yaml: not there")
    if (metrics := directory / FILE_NAME).is_file():
        bundle.files[f"run/{FILE_NAME}"] = "".join(_last_metrics(metrics, redactor))
    else:
        bundle.left_out.append(f"run/{FILE_NAME}: not there")
    _collect_hangs(bundle, directory / HANGS, redactor)
    bundle.files["run/checkpoints.json"] = _json(list(_checkpoints(directory / "checkpoints")))


def _last_metrics(path: Path, redactor: Redactor) -> Iterator[str]:
    """The newest start and the last lines, each with its known fields only."""
    last: deque[dict[str, object]] = deque(maxlen=LAST_METRICS)
    start: dict[str, object] | None = None
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                data = json.loads(line)
            except ValueError:
                # The line that a killed run was writing.
                continue
            if isinstance(data, dict):
                last.append(data)
                start = data if data.get("kind") == "start" else start
    if start is not None and not any(line is start for line in last):
        last.appendleft(start)
    for data in last:
        kept = {name: value for name, value in data.items() if name in METRIC_FIELDS}
        yield json.dumps(redactor.data(kept)) + "\n"


def _checkpoints(folder: Path) -> Iterator[dict[str, object]]:
    for path in sorted(folder.glob("step_*"), key=lambda path: (len(path.name), path.name)):
        if path.is_dir() and _STEP.fullmatch(path.name):
            files = [file for file in path.rglob("*") if file.is_file()]
            yield {"name": path.name, "files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _collect_hangs(bundle: Bundle, folder: Path, redactor: Redactor) -> None:
    """The newest reports, each with its known fields only."""
    for path in sorted(folder.glob("hang_*.json"))[-LAST_HANGS:]:
        try:
            data = json.loads(path.read_text())
            kept = {name: value for name, value in data.items() if name in HANG_FIELDS}
        except (OSError, ValueError, AttributeError) as error:
            bundle.left_out.append(redactor.text(f"run/hangs/{path.name}: {error}"))
            continue
        bundle.files[f"run/hangs/{path.name}"] = _json(redactor.data(kept))


def _collect_dumps(bundle: Bundle, found: Sequence[Path], redactor: Redactor) -> None:
    if not found:
        bundle.left_out.append("flight_recorder: no dump on this host; TORCH_FR_BUFFER_SIZE=2000 turns it on")
    for number, path in enumerate(found):
        rank = re.search(r"\d+$", path.name)
        name = f"flight_recorder/{number}-rank-{rank[0] if rank else 'unknown'}.json"
        try:
            bundle.files[name] = _json(redactor.data(read_dump(path)))
        except MoefoldError as error:
            bundle.left_out.append(redactor.text(f"flight_recorder: {error}"))


def _json(value: object) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"
