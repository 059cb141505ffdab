"""The form on top of the served page: the question, to be asked again with something changed.

Values come back as text from a browser, so every one is checked against what the form offered: names against lists,
numbers against bounds. All problems are shown at once, and no wrong value reaches the planner. Of runs, only recipes
and the one that the server was started with can be named, so a request never opens a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import isfinite

from moefold.errors import ConfigError, Problem
from moefold.hardware.cluster import GPUS, Cluster, cluster_of
from moefold.plan.framework_rules import FrameworkName
from moefold.plan.search.proposal import Question, headroom_of
from moefold.plan.search.space import pinned
from moefold.recipes.catalog import RECIPES, recipe

ANY = "any"
_SIZES = tuple(str(2**power) for power in range(9))
_PINS: Mapping[str, tuple[str, ...]] = {
    "tp": _SIZES[:5],
    "cp": _SIZES[:7],
    "pp": _SIZES[:7],
    "vpp": ("1", "2", "3", "4", "5", "6", "8", "16"),
    "ep": _SIZES,
    "etp": _SIZES[:4],
    "sequences": _SIZES[:4],
    "ep_overlap": ("true", "false"),
    "dispatcher": ("all_to_all", "all_gather", "deepep", "hybridep"),
    "graphs": ("none", "partial", "full"),
    "format": ("bfloat16", "fp8_tensor", "fp8_blockwise", "mxfp8"),
    "recompute": ("none", "attention", "experts", "attention+experts", "mla_up", "norms+activation+mla_up", "full"),
}


@dataclass(frozen=True)
class Number:
    """One number of the form: a slider where it has a step worth sliding over."""

    label: str
    low: float
    high: float
    step: float = 1
    slider: bool = False


_NUMBERS: Mapping[str, Number] = {
    "gpus": Number("GPUs", 1, 1_000_000),
    "domain": Number("NVLink domain", 1, 4096),
    "nic": Number("network, GB/s per GPU", 5, 400, 5, slider=True),
    "global_batch": Number("global batch", 1, 10_000_000),
    "seq": Number("tokens per sequence", 1, 10_000_000),
    "imbalance": Number("busiest rank over mean", 1, 3, 0.05, slider=True),
    "headroom": Number("memory to leave free", 0, 0.5, 0.01, slider=True),
    "mtbf_hours": Number("GPU hours per failure", 1, 1e9),
}
_FRAMEWORKS: tuple[FrameworkName, ...] = ("moefold", "megatron", "fsdp2")

SCRIPT = """
const form = document.querySelector('form.ask');
const ask = () => { document.querySelector('main').classList.add('asking'); form.requestSubmit(); };
for (const field of form.querySelectorAll('input,select')) field.addEventListener('change', ask);
for (const field of form.querySelectorAll('input[type=range]')) {
  field.addEventListener('input', () => { field.parentNode.querySelector('output').textContent = field.value; });
}
"""


def values_of(question: Question) -> dict[str, str]:
    """What the form shows for a question."""
    cluster, data = question.cluster, question.run.data
    values = {
        "run": question.name,
        "gpu": cluster.gpu.name,
        "framework": question.framework,
        "gpus": str(cluster.num_gpus),
        "domain": str(cluster.domain),
        "nic": f"{cluster.nic_gb_s:g}",
        "global_batch": str(data.global_batch),
        "seq": str(data.seq_len),
        "imbalance": f"{question.imbalance:g}",
        "headroom": f"{headroom_of(question):g}",
        "mtbf_hours": f"{question.mtbf_hours:g}",
    }
    fixed = {name: ",".join(words) for name, words in pinned(question.fixed)}
    return values | {name: fixed.get(name, ANY) for name in _PINS}


def question_of_form(values: Mapping[str, str], first: Question) -> Question:
    """The question that these values ask; ``first`` is the one the server was started with."""
    names = {"run": _runs(first), "gpu": _gpus(first), "framework": _FRAMEWORKS}
    problems = [
        Problem(name, f"cannot be {values[name][:40]!r}", f"choose {', '.join(known)}")
        for name, known in names.items()
        if name in values and values[name] not in known
    ]
    numbers = {name: _read(name, values[name], problems) for name in _NUMBERS if values.get(name)}
    pins = _pins(values, first, problems)
    if problems:
        raise ConfigError(*problems)
    shown = headroom_of(first)
    name = values.get("run", first.name)
    run = first.run if name == first.name else recipe(name)
    batch = int(numbers.get("global_batch", run.data.global_batch))
    data = replace(run.data, global_batch=batch, seq_len=int(numbers.get("seq", run.data.seq_len)))
    return replace(
        first,
        run=replace(run, data=data),
        name=name,
        named=first.named if name == first.name else recipe(name),
        dotted=first.dotted if name == first.name else {},
        cluster=replace(
            _cluster(values.get("gpu", first.cluster.gpu.name), first.cluster),
            num_gpus=int(numbers.get("gpus", first.cluster.num_gpus)),
            domain=int(numbers.get("domain", first.cluster.domain)),
            nic_gb_s=numbers.get("nic", first.cluster.nic_gb_s),
        ),
        framework=next(framework for framework in _FRAMEWORKS if framework == values.get("framework", first.framework)),
        release=first.release if values.get("framework", first.framework) == first.framework else "",
        fixed=",".join(f"{choice}={value}" for choice, value in pins.items()),
        imbalance=numbers.get("imbalance", first.imbalance),
        headroom=first.headroom if numbers.get("headroom", shown) == shown else numbers["headroom"],
        mtbf_hours=numbers.get("mtbf_hours", first.mtbf_hours),
    )


def form_html(values: Mapping[str, str], first: Question, problems: Sequence[str] = ()) -> str:
    fields = [
        _select("run", "run", _runs(first), values),
        _select("gpu", "GPU", _gpus(first), values),
        _select("framework", "framework", _FRAMEWORKS, values),
        *(_number(name, number, values) for name, number in _NUMBERS.items()),
        *(_select(name, name, (ANY, *known), values) for name, known in _PINS.items()),
        "<button>plan</button>",
    ]
    warnings = "".join(f'<p class="warn">{escape(problem)}</p>' for problem in problems)
    return f'{warnings}<form class="ask" method="get" action="/">{"".join(fields)}</form>'


def _gpus(first: Question) -> tuple[str, ...]:
    """Those of the table, and one of the server's own cluster file."""
    own = () if first.cluster.machine is not None else (first.cluster.gpu.name,)
    return tuple(dict.fromkeys((*own, *GPUS)))


def _cluster(gpu: str, first: Cluster) -> Cluster:
    """What the server was started with, network and cost included; another GPU is its table's, without a cost."""
    return first if gpu == first.gpu.name else cluster_of(gpu, first.num_gpus, network=first.network)


def _runs(first: Question) -> tuple[str, ...]:
    return tuple(dict.fromkeys((first.name, *RECIPES)))


def _pins(values: Mapping[str, str], first: Question, problems: list[Problem]) -> dict[str, str]:
    """What was pinned on the command line stays allowed, and choices that the form does not show stay pinned."""
    own = {name: ",".join(words) for name, words in pinned(first.fixed)}
    pins = {name: value for name, value in own.items() if name not in _PINS}
    for name, known in _PINS.items():
        value = values.get(name, ANY)
        if value in known or value == own.get(name):
            pins[name] = value
        elif value != ANY:
            problems.append(Problem(name, f"cannot be {value[:40]!r}", f"choose {', '.join((ANY, *known))}"))
    return pins


def _read(name: str, text: str, problems: list[Problem]) -> float:
    number = _NUMBERS[name]
    try:
        value = float(text) if len(text) < 24 else float("nan")
    except ValueError:
        value = float("nan")
    whole = number.step != 1 or value == int(value) if isfinite(value) else False
    if not whole or not number.low <= value <= number.high:
        problems.append(
            Problem(name, f"cannot be {text[:24]!r}", f"use a number from {number.low:g} to {number.high:g}")
        )
        return number.low
    return value


def _select(name: str, label: str, known: Sequence[str], values: Mapping[str, str]) -> str:
    chosen = values.get(name, "")
    # A pinned value that the form does not usually offer stays on offer.
    offered = dict.fromkeys((*known, *([chosen] if chosen else [])))
    options = "".join(f"<option{' selected' if value == chosen else ''}>{escape(value)}</option>" for value in offered)
    return f'<label>{escape(label)}<select name="{name}">{options}</select></label>'


def _number(name: str, number: Number, values: Mapping[str, str]) -> str:
    value = escape(values.get(name, ""), quote=True)
    bounds = f'name="{name}" value="{value}" min="{number.low:g}" max="{number.high:g}" step="{number.step:g}"'
    if number.slider:
        return (
            f'<label><span>{escape(number.label)} <output>{value}</output></span><input type="range" {bounds}></label>'
        )
    return f'<label>{escape(number.label)}<input type="number" {bounds}></label>'
