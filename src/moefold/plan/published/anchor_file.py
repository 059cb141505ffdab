"""A measured run to anchor predictions by: a directory of `moefold train`, a file, or a published record.

    runs/NAME                its `metrics.jsonl`: configuration, ranks, GPU, and the median step
    measured.yaml            configuration, cluster and step as somebody states them (also JSON)
    published.jsonl:ID       a record of a published collection, by its id

A file has these keys; `tokens_per_second_per_gpu` may stand in place of `seconds_per_step`:

    run: deepseek_v3                              # a recipe, or a run file beside this one
    changes: {parallel.pp: 8, parallel.ep: 32}    # what was different
    gpu: H100                                     # or `cluster:`, a cluster file beside this one
    gpus: 1024
    framework: megatron                           # moefold unless said
    seconds_per_step: 12.3

What the anchor's cluster does not say of its links is the planned cluster's, where both have the same GPU. What cannot
be read is refused with everything that is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from moefold.config.loading import load_run_file, override, run_from_mapping
from moefold.config.run import RunConfig
from moefold.config.strict import MAX_BYTES, ScalarError, read_yaml
from moefold.errors import ConfigError, MoefoldError, Problem, ProblemsError
from moefold.hardware.cluster import GPUS, Cluster, cluster_of, gpu_named, peak_flops, read_cluster
from moefold.plan.framework_rules import named_release
from moefold.plan.published.points import published_workload
from moefold.plan.search.proposal import with_framework
from moefold.plan.timing.anchoring import Anchor
from moefold.plan.workload import workload_of_run
from moefold.recipes.catalog import recipe

METRICS = "metrics.jsonl"
# The first steps of a process compile, warm up and fill caches; a median of fewer steps than that after them is chance.
_WARM_UP, _FEWEST_STEPS = 5, 5
_KEYS = ("run", "changes", "gpu", "cluster", "gpus", "framework", "seconds_per_step", "tokens_per_second_per_gpu")
_EXAMPLE = "`run: deepseek_v3`, `gpu: H100`, `gpus: 1024` and `seconds_per_step: 12.3`"
_FORMS = "give a run's directory, a YAML or JSON file with its configuration, cluster and step, or FILE.jsonl:ID"
Read = TypeVar("Read")


def read_anchor(given: str | Path, planned: Cluster) -> Anchor:
    """The measured run that is meant; ``planned`` is the cluster of the plan."""
    text = str(given)
    if planned.machine is not None:
        message = "errors of predictions were measured on GPUs, and this plan is for a machine that was itself measured"
        raise ConfigError(Problem("anchor", message, "leave --anchor or --machine out"))
    file, dot, id = text.rpartition(".jsonl:")
    if dot:
        return _of_record(Path(f"{file}.jsonl"), id)
    path = Path(text)
    if path.is_dir():
        return _of_directory(path, planned)
    if path.suffix in (".yaml", ".yml", ".json"):
        return _of_file(path, planned)
    what = "which of its records?" if path.suffix == ".jsonl" else "is none of the three"
    raise ConfigError(Problem(f"anchor {text}", what, _FORMS))


# ---- a published record ----


def _of_record(path: Path, id: str) -> Anchor:
    found, number = None, 0
    for line in _lines(path):
        record = _object(line)
        number += record is not None
        if record is not None and record.get("id") == id:
            found = record
    if found is None:
        raise ConfigError(Problem(f"anchor {path}", f"none of its {number:,} records has the id {id!r}", _FORMS))
    seconds = (found.get("target") or {}).get("step_time_s")
    needed = {name: found.get(name) for name in ("model", "hardware", "parallel", "precision", "seq_len", "gbs")}
    missing = [name for name, value in (needed | {"target.step_time_s": seconds}).items() if not value]
    if seconds is None or missing:
        raise ConfigError(
            *(Problem(f"anchor {id}: {name}", "is missing, and a plan depends on it") for name in missing)
        )
    try:
        return Anchor(id, published_workload(found), float(seconds), "published")
    # A record may lack any field or hold any value.
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(Problem(f"anchor {id}", f"cannot be read as a run: {error!r}")) from None


# ---- a run's directory ----


def _of_directory(directory: Path, planned: Cluster) -> Anchor:
    start: dict[str, Any] | None = None
    seconds: list[float] = []
    for line in _lines(directory / METRICS):
        data = _object(line) or {}
        if data.get("kind") == "start":
            # A resumed run may have another configuration or other GPUs, and warms up again.
            start, seconds = data, []
        elif data.get("kind") == "step" and not data.get("skipped"):
            seconds.append(_number((data.get("seconds") or {}).get("step")))
    steady = [each for each in seconds[_WARM_UP:] if each > 0]
    where, problems = f"anchor {directory / METRICS}", list[Problem]()
    if start is None:
        raise ConfigError(Problem(where, "has no line of kind start, which holds the configuration", _FORMS))
    if len(steady) < _FEWEST_STEPS:
        message = f"has {len(seconds)} steps since its last start, of which the first {_WARM_UP} do not count"
        problems.append(Problem(where, message, f"use a run with at least {_WARM_UP + _FEWEST_STEPS}"))
    gpu = _gpu_of_device(str(start.get("device")))
    if gpu is None:
        message = f"ran on {start.get('device')}, and errors of predictions were measured on GPUs of the table"
        problems.append(Problem(f"{where}: device", message, f"use a run on one of {', '.join(GPUS)}"))
    world = int(_number(start.get("world")))
    if world < 1:
        problems.append(Problem(f"{where}: world", "does not say on how many GPUs it ran"))
    run = _kept(lambda: run_from_mapping(start.get("config")), problems, f"{where}: config")
    if problems or run is None or gpu is None:
        raise ConfigError(*problems)
    cluster = _on(planned, gpu, world)
    workload = _kept(lambda: workload_of_run(run, cluster), problems, where)
    if workload is None:
        raise ConfigError(*problems)
    return Anchor(directory.name, workload, median(steady))


def _gpu_of_device(device: str) -> str | None:
    """The GPU of the table that torch calls ``device``; None for those that only have its name in theirs."""
    words = re.findall(r"[A-Z0-9]+", device.upper())
    name = next((name for name in GPUS if name in words), None)
    if name is None or peak_flops(device) is None:
        return None
    narrow = f"{name}-PCIe"
    return narrow if "PCIE" in words and narrow in GPUS else name


# ---- a file ----


def _of_file(path: Path, planned: Cluster) -> Anchor:
    where, problems = f"anchor {path}", list[Problem]()
    data = _mapping(path, problems)
    problems += [
        Problem(f"{where}: {key}", "unknown key", f"known here: {', '.join(_KEYS)}") for key in data if key not in _KEYS
    ]
    run = None
    if "run" not in data:
        problems.append(Problem(f"{where}: run", "is missing: which configuration?", f"a file has {_EXAMPLE}"))
    else:
        run = _kept(lambda: _run_of(path, data), problems, where)
    cluster = _cluster_of(path, data, planned, problems)
    framework, release = _kept(lambda: named_release(str(data.get("framework", "moefold"))), problems, where) or (
        "moefold",
        "",
    )
    given = [key for key in ("seconds_per_step", "tokens_per_second_per_gpu") if key in data]
    measured = _number(data.get(given[0])) if given else 0.0
    if len(given) != 1:
        problems.append(Problem(f"{where}: seconds_per_step", "is missing" if not given else "is said twice", _EXAMPLE))
    elif not measured > 0:
        problems.append(Problem(f"{where}: {given[0]}", f"is {data[given[0]]!r}", "use a positive number"))
    workload = None
    if run is not None and cluster is not None:
        known, on = run, cluster
        workload = _kept(lambda: with_framework(workload_of_run(known, on), framework, release), problems, where)
    if problems or workload is None:
        raise ConfigError(*problems)
    if given == ["tokens_per_second_per_gpu"]:
        measured = workload.global_tokens / workload.cluster.num_gpus / measured
    return Anchor(path.name, workload, measured)


def _mapping(path: Path, problems: list[Problem]) -> Mapping[str, object]:
    try:
        data, found = read_yaml(_text(path, MAX_BYTES))
    except ScalarError as error:
        raise ConfigError(Problem(f"anchor {path}", str(error))) from None
    problems += [replace(each, path=f"anchor {path}: {each.path}") for each in found]
    if not isinstance(data, dict):
        raise ConfigError(*problems, Problem(f"anchor {path}", "states no run", f"a file has {_EXAMPLE}"))
    return data


def _run_of(path: Path, data: Mapping[str, object]) -> RunConfig:
    name, changes = str(data["run"]), data.get("changes") or {}
    if not isinstance(changes, dict):
        raise ConfigError(Problem("changes", "are no keys and values", "as in {parallel.ep: 8}"))
    run = load_run_file(path.parent / name, recipe) if name.endswith((".yaml", ".yml")) else recipe(name)
    return override(run, changes) if changes else run


def _cluster_of(path: Path, data: Mapping[str, object], planned: Cluster, problems: list[Problem]) -> Cluster | None:
    where, gpus = f"anchor {path}", data.get("gpus")
    before = len(problems)
    if gpus is not None and (not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1):
        problems.append(Problem(f"{where}: gpus", f"is {gpus!r}", "use a positive whole number"))
    elif gpus is None and "cluster" not in data:
        problems.append(Problem(f"{where}: gpus", "is missing: on how many GPUs?", f"a file has {_EXAMPLE}"))
    if ("gpu" in data) == ("cluster" in data):
        said = "and cluster are both there" if "gpu" in data else "is missing: which GPU?"
        problems.append(Problem(f"{where}: gpu", said, f"use one of {', '.join(GPUS)}, or `cluster: FILE`"))
        return None
    number = gpus if isinstance(gpus, int) else None
    if "cluster" in data:
        return _kept(lambda: read_cluster(path.parent / str(data["cluster"]), number), problems, where)
    named = _kept(lambda: gpu_named(str(data["gpu"])), problems, f"{where}: gpu")
    return None if named is None or len(problems) > before or number is None else _on(planned, named.name, number)


def _on(planned: Cluster, gpu: str, num_gpus: int) -> Cluster:
    """So many GPUs: with the links of the planned cluster, if it has the same ones."""
    return replace(planned, num_gpus=num_gpus) if planned.gpu.name == gpu else cluster_of(gpu, num_gpus)


# ---- reading ----


def _kept(read: Callable[[], Read], problems: list[Problem], where: str) -> Read | None:
    """What was read, or None and its problems beside those found already."""
    try:
        return read()
    except ProblemsError as error:
        problems += [replace(each, path=f"{where}: {each.path}") for each in error.problems]
    except MoefoldError as error:
        problems.append(Problem(where, str(error)))
    return None


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path, most: int | None = None) -> str:
    try:
        with path.open("rb") as file:
            return file.read(-1 if most is None else most + 1).decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(Problem(f"anchor {path}", f"cannot be read: {error.strerror}", _FORMS)) from None


def _object(line: str) -> dict[str, Any] | None:
    """None for half a line: a run that was killed leaves one."""
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _number(value: object) -> float:
    """0 for what is none."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return float(value) if known else 0.0  # type: ignore[arg-type]
