"""Predict a run on a cluster, and search the best layout for it. No GPU and no torch are needed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moefold.api.runs import load_run
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem
from moefold.hardware.cluster import Cluster, cluster_of, cluster_of_machine, read_cluster
from moefold.hardware.machine import over_link, read_machine
from moefold.plan.framework_commands import framework_command
from moefold.plan.framework_rules import FrameworkName
from moefold.plan.launch_command import changes_to_run, with_stages
from moefold.plan.memory.peak import LABEL_UNIT, USABLE_SHARE
from moefold.plan.published.anchor_file import read_anchor
from moefold.plan.report.plan_page import page
from moefold.plan.report.proposal_report import layout_data, proposal_data
from moefold.plan.search.batch_ramp import parse_ramp
from moefold.plan.search.goodput import USUAL_MTBF_HOURS, USUAL_RESTART_SECONDS
from moefold.plan.search.proposal import Proposal, Question, propose
from moefold.plan.search.search import Progress
from moefold.recipes.catalog import RECIPES


class Plan:
    """The answer of `plan`: the chosen layout, with its predicted memory and step time.

    Without a search the chosen layout is the run's own.

    >>> import moefold
    >>> run = moefold.load_run("qwen3_30b_a3b")
    >>> plan = moefold.plan(run, gpu="H100", gpus=64, search=False)
    >>> isinstance(plan, moefold.Plan), plan.layout["ep"], plan.memory_bytes < plan.capacity_bytes
    (True, 8, True)
    >>> sorted(plan.to_dict())[:4]
    ['alike', 'anchor', 'batch_advice', 'batch_ramp']
    """

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's memory suffices."""
        return self.proposal.chosen.memory.fits

    @property
    def step_seconds(self) -> float:
        """Predicted time of one optimizer step."""
        return self.proposal.chosen.time.step_seconds

    @property
    def step_interval(self) -> tuple[float, float]:
        """80 % of measured runs of this kind lie between these step times."""
        return self.proposal.chosen.time.low, self.proposal.chosen.time.high

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Predicted throughput."""
        return self.proposal.chosen.tokens_per_second_per_gpu

    @property
    def tflops_per_gpu(self) -> float:
        """Model FLOPs, in the convention of published runs; recomputation is not counted."""
        return self.proposal.chosen.tflops_per_gpu

    @property
    def mfu(self) -> float:
        """`tflops_per_gpu` over the peak of the units that matmuls run on: those of 8 bits with FP8 recipes."""
        return self.proposal.chosen.mfu

    @property
    def wall(self) -> str:
        """What limits the step: memory, communication, compute or host."""
        return self.proposal.chosen.wall

    @property
    def memory_bytes(self) -> float:
        """Peak memory of the fullest rank."""
        return self.proposal.chosen.memory.total

    @property
    def capacity_bytes(self) -> float:
        """Memory of one GPU that a run can use."""
        return self.proposal.chosen.memory.capacity

    @property
    def layout(self) -> dict[str, Any]:
        """tp, cp, pp, vpp, ep, etp, dp, micro_batch, schedule, dispatcher, recompute and the other choices."""
        return layout_data(self.proposal.chosen.workload)

    @property
    def run(self) -> RunConfig:
        """The run with the chosen layout, ready for `prove`, `Trainer` or another `plan`."""
        asked = self.proposal.question.run
        return load_run(asked, changes_to_run(with_stages(self.proposal.chosen.workload), asked))

    @property
    def command(self) -> str:
        """The command that starts it, once per node."""
        return " ".join(self.proposal.command)

    @property
    def framework_command(self) -> str | None:
        """The command with which the framework that was asked for starts it: Megatron-LM, or torchtitan if it has the
        model; None for moefold."""
        theirs = framework_command(self.proposal.chosen.workload)
        return None if theirs is None else " ".join(theirs.words)

    @property
    def cost(self) -> float | None:
        """What `days` on all GPUs cost, by the cluster file; None where it says nothing of costs."""
        return self.proposal.cost

    @property
    def megawatt_hours(self) -> float:
        """What the GPUs take in `days` at their full power: at most so much, hosts, network and cooling left out."""
        return self.proposal.megawatt_hours

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this layout, one paragraph each."""
        return self.proposal.reasons

    @property
    def days(self) -> float:
        """Days to train on `tokens` tokens, with failures, restarts and saves."""
        return self.proposal.days

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, as `moefold plan --json` prints it."""
        return proposal_data(self.proposal)

    def html(self) -> str:
        """One self-contained page, as `moefold plan --html` writes it."""
        return page(self.proposal)


def plan(
    run: RunConfig | str | Path,
    gpu: str = "H100",
    gpus: int | None = None,
    *,
    search: bool = True,
    fix: str = "",
    recipes: bool = False,
    framework: FrameworkName = "moefold",
    machine: str | Path | None = None,
    cluster: str | Path | None = None,
    domain: int | None = None,
    nic_gb_s: float | None = None,
    imbalance: float = 1.0,
    headroom: float | None = None,
    fit: float | None = None,
    tokens: float = 1e12,
    batch_ramp: str = "",
    anchor: str | Path | None = None,
) -> Plan:
    """Will the run fit, how fast will it be, what limits it, and which layout is best on `gpus` GPUs?

    `run` is a run, or what `load_run` makes one of: a recipe's name, or the path of a file.
    `gpu` is a name that `moefold plan --help` lists; `machine` a file that `moefold bench calibrate` wrote, for CPU
    ranks instead; `cluster` a YAML file that describes a cluster of your own (docs/plan.md). `fix` pins choices of the
    search, as in `"tp=1,ep=32,64"`; `search=False` predicts the run's own layout, and `recipes` lets it choose a
    precision recipe too. `domain` is the number of GPUs that fast links join and `nic_gb_s` each GPU's network
    bandwidth, where they are not the GPU's usual ones; with `machine`, every rank is on a host of its own behind such a
    link. `imbalance` is the number of rows of the busiest expert rank over the mean, `headroom` the fraction of memory
    to leave free (unless given 0.05, and a tenth where that costs under 3 % of the step), `fit` the bytes to fit into
    whatever the GPU has, `tokens` how many the whole training run has, and `batch_ramp` smaller batches that it begins
    with, as in `"512:100B,1024:200B"`. `anchor` is a measured run by which predictions are rescaled: a run's directory,
    a file that states one, or `published.jsonl:ID` (docs/plan.md).

    >>> import moefold
    >>> plan = moefold.plan("qwen3_30b_a3b", gpu="H100", gpus=64, fix="tp=1,cp=1,pp=1,ep=8,16")
    >>> plan.fits, plan.layout["ep"] in (8, 16)
    (True, True)
    """
    run = load_run(run)
    made = cluster_for(
        gpu,
        gpus,
        machine=machine,
        described=cluster,
        domain=domain,
        nic_gb_s=nic_gb_s,
        imbalance=imbalance,
        headroom=headroom,
        fit=fit,
    )
    named, dotted = _origin(run)
    return answer(
        Question(
            run=run,
            name=run.name,
            cluster=made,
            named=named,
            dotted=dotted,
            framework=framework,
            fixed=fix,
            recipes=recipes,
            searching=search,
            imbalance=imbalance,
            headroom=headroom if fit is None else headroom or 0.0,
            mtbf_hours=USUAL_MTBF_HOURS,
            restart_seconds=USUAL_RESTART_SECONDS,
            tokens=tokens,
            batch_ramp=parse_ramp(batch_ramp),
            anchor=None if anchor is None else read_anchor(anchor, made),
        )
    )


def answer(question: Question, progress: Progress | None = None) -> Plan:
    """The plan for a question that is put together already, as the command line does."""
    return Plan(propose(question, progress))


def cluster_for(
    gpu: str,
    gpus: int | None,
    *,
    machine: str | Path | None = None,
    described: str | Path | None = None,
    domain: int | None = None,
    nic_gb_s: float | None = None,
    fit: float | None = None,
    **numbers: float | None,
) -> Cluster:
    """The cluster, or every problem with what was asked; `numbers` are further options to check, by their names.

    ``described`` is the path of a cluster file. With ``fit`` every GPU has so many bytes that a run can use.
    """
    problems = []
    if gpus is None and (described is None or machine is not None):
        problems.append(Problem("gpus", "how many GPUs?", "give --gpus 1024, or gpus=1024"))
    if machine is not None and described is not None:
        problems.append(
            Problem("cluster", "describes GPUs, and --machine ranks on a computer", "leave one of them out")
        )
    lowest = {"gpus": 1, "domain": 1, "nic": 1e-6, "global_batch": 1, "seq": 1, "imbalance": 1}
    given = {"gpus": gpus, "domain": domain, "nic": nic_gb_s, **numbers}
    for name, low in lowest.items():
        value = given.get(name)
        if value is not None and not low <= value <= 10_000_000:
            problems.append(Problem(name.replace("_", "-"), f"is {value:g}", f"use a number from {low:g}"))
    headroom = numbers.get("headroom") or 0.0
    if not 0 <= headroom < 1:
        problems.append(Problem("headroom", f"is {headroom:g}", "use a fraction, such as 0.05"))
    if fit is not None and not 2**20 <= fit <= 2**60:
        problems.append(Problem("fit", f"is {fit:g} bytes", "use a size such as 80GiB"))
    if problems or (gpus is None and described is None):
        raise ConfigError(*problems)
    if machine is not None and gpus is not None:
        measured = read_machine(Path(machine))
        made = cluster_of_machine(measured if nic_gb_s is None else over_link(measured, nic_gb_s), gpus)
    else:
        named = cluster_of(gpu, gpus or 1) if described is None else read_cluster(described, gpus)
        made = replace(named, domain=domain or named.domain, nic_gb_s=nic_gb_s or named.nic_gb_s)
    if fit is None:
        return made
    return replace(made, gpu=replace(made.gpu, memory_gb=fit / (LABEL_UNIT * USABLE_SHARE)))


def _origin(run: RunConfig) -> tuple[RunConfig | None, dict[str, str]]:
    """The recipe of the run's name, and the dotted keys in which the run differs from it."""
    if run.name not in RECIPES:
        return None, {}
    named = RECIPES[run.name]()
    return named, _differences(asdict(named), asdict(replace(run, name=named.name)))


def _differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            found |= _differences(old, value, f"{prefix}{key}.")
        elif isinstance(value, dict):
            found |= _differences({}, value, f"{prefix}{key}.")
        elif value != old or key not in before:
            found[f"{prefix}{key}"] = _word(value)
    return found


def _word(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
