"""A proposal: everything that the planner reports about one question, computed once and shown in many ways.

The terminal, JSON, the HTML page and the page with sliders all read this. Making one searches (unless told not to),
predicts the best layout, the runner-up and the user's own in full, answers the what-if questions, and computes goodput.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moefold.blueprint.param_counts import count_parameters
from moefold.checks.run_all import RULES_TO_TRAIN, problems
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.errors import Problem, ProblemsError
from moefold.hardware.cluster import Cluster
from moefold.plan.framework_rules import FrameworkName
from moefold.plan.launch_command import beyond_moefold, changes_to_run, launch_words, with_stages
from moefold.plan.memory.saving_steps import savings, savings_of
from moefold.plan.predict import predict
from moefold.plan.prediction import Prediction
from moefold.plan.search.batch_ramp import Ramp, RampPhase, days_of, ramp_phases
from moefold.plan.search.candidates import choice_of_workload, microbatch_group, why_not_started
from moefold.plan.search.cheapest_savings import cheapest_fit
from moefold.plan.search.explain import (
    SwitchedOn,
    alike_words,
    batch_words,
    headroom_words,
    rank_order_words,
    savings_words,
    sharding_words,
    sweep_spread,
    switched_on,
    versus,
    wall_words,
    what_would_move,
    would_fit_words,
)
from moefold.plan.search.goodput import USUAL_MTBF_HOURS, USUAL_RESTART_SECONDS, Faults, Goodput, faults_of, goodput
from moefold.plan.search.search import ALIKE, NothingFitsError, Progress, Result, anything_fits, search, tighter
from moefold.plan.search.space import LayoutChoice, narrowed, usual_space
from moefold.plan.search.what_if import Answer, BatchAdvice, answers, better_batch
from moefold.plan.timing.anchoring import Anchor, Anchored, anchored
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import MEGATRON_PRECISION, Framework, Workload, changed, workload_of_run
from moefold.units import format_bytes

# What a node's eight GPUs write to shared storage, divided by eight: an assumption that --write-seconds replaces.
STORAGE_GB_S = 0.25
_TIGHT = 0.05
# Share of the memory that proposals leave free unless told otherwise.
USUAL_HEADROOM = 0.05
# Candidates that are checked as runs, the best first.
_CHECKED = 100
# Where nothing fits: so many times the GPUs are tried.
_TIMES_AS_MANY = (2, 4, 8, 16, 32, 64)
# What a command says in place of what a run does not, by the key that `checks/train.py` asks for.
_PLACEHOLDERS = {"data.train": "$DATA", "train.steps": "$STEPS", "optim.lr": "$LR"}


@dataclass(frozen=True)
class Question:
    """What the user asks."""

    run: RunConfig
    # How the run was named on the command line: a recipe or a file.
    name: str
    cluster: Cluster
    # What the name alone stands for, and the dotted keys that were changed in it.
    named: RunConfig | None = None
    dotted: Mapping[str, str] = field(default_factory=dict)
    framework: FrameworkName = "moefold"
    # Of the framework: "" is every release whose rules are known (`plan/framework_rules.py`).
    release: str = ""
    fixed: str = ""
    # Whether the search also chooses a precision recipe.
    recipes: bool = False
    searching: bool = True
    imbalance: float = 1.0
    # Share of the GPU's memory to leave free; None: `USUAL_HEADROOM`, and more where that costs next to nothing.
    headroom: float | None = None
    mtbf_hours: float = USUAL_MTBF_HOURS
    restart_seconds: float = USUAL_RESTART_SECONDS
    # None: computed from the states' bytes and the links' bandwidth.
    save_seconds: float | None = None
    write_seconds: float | None = None
    tokens: float = 1e12
    # Smaller batches before the run's own, and tokens of each.
    batch_ramp: Ramp = ()
    # A measured run by which predictions are rescaled.
    anchor: Anchor | None = None


@dataclass(frozen=True)
class Freed:
    """A way to save memory that the choice does not use: what it frees on the fullest rank, and what it costs."""

    name: str
    bytes: float
    # Share by which the step gets longer.
    slower: float


@dataclass(frozen=True)
class Proposal:
    question: Question
    chosen: Prediction
    # The user's own layout, or why it cannot be.
    own: Prediction | None
    own_problem: str
    runner_up: Prediction | None
    # What is predicted to be faster without headroom, and the fastest with it, where a roomier one was chosen.
    tighter: Prediction | None
    fastest: Prediction | None
    # A batch nearby that divides better.
    batch: BatchAdvice | None
    result: Result | None
    answers: tuple[Answer, ...]
    freed: tuple[Freed, ...]
    # Savings that the search switched on, and why data parallelism is sharded as it is.
    switched_on: tuple[SwitchedOn, ...]
    sharding: str
    # "Why this layout", one paragraph each.
    reasons: tuple[str, ...]
    # What starts it, in pieces to be folded into lines; none where moefold has no run that is near.
    command: tuple[str, ...]
    # What moefold cannot do of it.
    beyond: tuple[str, ...]
    faults: Faults
    goodput: Goodput
    days: float
    phases: tuple[RampPhase, ...]
    anchored: Anchored | None = None

    @property
    def cost(self) -> float | None:
        """Of all GPUs for ``days``; None where nobody said what an hour of one costs."""
        cluster = self.question.cluster
        rate = cluster.cost_per_gpu_hour
        return None if rate is None else rate * cluster.num_gpus * self.days * 24

    @property
    def megawatt_hours(self) -> float:
        """Of the GPUs at full power for ``days``; without hosts, network and cooling."""
        cluster = self.question.cluster
        return cluster.gpu.watts * cluster.num_gpus * self.days * 24 / 1e6


def propose(question: Question, progress: Progress | None = None) -> Proposal:
    own, problem = _own(question)
    template = _template(question, own)
    anchor = anchored(question.anchor, template) if question.anchor else None
    if anchor:
        template = replace(template, rescaling=anchor.rescaling)
        own = template if own else None
    result, headroom = None, headroom_of(question)
    space = narrowed(usual_space(template, question.recipes), question.fixed)
    if question.searching:
        try:
            searched = search(template, space, progress, own is not None, headroom)
        except NothingFitsError as error:
            raise _with_enough_gpus(error, question, progress) from None
        result = _startable(searched, question)
    elif own is None:
        raise problem if problem is not None else AssertionError("a run without a layout has a problem")
    picked = None if result is None else result.preferred if question.headroom is None else result.best
    chosen = predict(template if picked is None else picked.workload)
    fastest = predict(result.best.workload) if result and picked is not result.best else None
    more = tighter(template, space, result) if result and headroom else None
    faster = predict(more.workload) if more and _starts_here(more.workload, question) else None
    batch = better_batch(template, space, headroom, chosen) if result else None
    saved = switched_on(chosen.workload, savings_of(template.run, template.is_own)) if result else ()
    sharding = sharding_words(chosen)
    own_prediction = predict(own) if own else None
    second = result.runner_up if result else None
    runner_up = predict(second.workload) if second else None
    asked = tuple(answers(chosen.workload))
    command, beyond = _launch(chosen.workload, question)
    faults = _faults(question)
    found = goodput(faults)
    phases = ramp_phases(chosen.workload, question.batch_ramp, question.tokens, found.effective)
    return Proposal(
        question=question,
        chosen=chosen,
        own=own_prediction,
        own_problem=str(problem or ""),
        runner_up=runner_up,
        tighter=faster,
        fastest=fastest,
        batch=batch,
        result=result,
        answers=asked,
        freed=tuple(_freed(chosen)),
        switched_on=saved,
        sharding=sharding,
        reasons=((anchor.words,) if anchor else ())
        + tuple(_reasons(chosen, runner_up, own_prediction, result, asked))
        + _memory_reasons(chosen, saved, sharding)
        + (_found_reasons(question, result, chosen, fastest or chosen, faster, batch) if result else ()),
        command=command,
        beyond=beyond,
        faults=faults,
        goodput=found,
        days=days_of(phases),
        phases=phases,
        anchored=anchor,
    )


def _template(question: Question, own: Workload | None) -> Workload:
    return own or with_framework(_without_layout(question), question.framework, question.release)


def headroom_of(question: Question) -> float:
    return USUAL_HEADROOM if question.headroom is None else question.headroom


def _with_enough_gpus(error: NothingFitsError, question: Question, progress: Progress | None) -> NothingFitsError:
    """The same, with the first of 2, 4, 8... times as many GPUs on which something fits."""
    if not error.lacks_memory:
        return error
    for times in _TIMES_AS_MANY:
        more = times * question.cluster.num_gpus
        larger = replace(question, cluster=replace(question.cluster, num_gpus=more))
        template = _template(larger, _own(larger)[0])
        space = narrowed(usual_space(template, question.recipes), question.fixed)
        if anything_fits(template, space, headroom_of(question), progress):
            return NothingFitsError(f"{error}; {more:,} GPUs would be enough, or free a choice", lacks_memory=True)
    tried = _TIMES_AS_MANY[-1] * question.cluster.num_gpus
    return NothingFitsError(f"{error}; neither on up to {tried:,} GPUs: free a choice", lacks_memory=True)


def _startable(result: Result, question: Question) -> Result:
    """Without candidates that `moefold check` would refuse, as far as the best are looked at."""
    found = next((n for n, each in enumerate(result.ranked[:_CHECKED]) if _starts_here(each.workload, question)), None)
    if found is None:
        return result
    left = result.ranked[found:]
    alike = sum(each.seconds <= (1 + ALIKE) * left[0].seconds for each in left[:_CHECKED])
    started = tuple(each for each in left[:alike] if _starts_here(each.workload, question))
    return replace(result, ranked=started + left[alike:])


def _starts_here(workload: Workload, question: Question) -> bool:
    if question.framework != "moefold":
        return True
    return not beyond_moefold(workload) and not problems(workload.run, question.cluster.num_gpus)


def _found_reasons(
    question: Question,
    result: Result,
    chosen: Prediction,
    fastest: Prediction,
    faster: Prediction | None,
    batch: BatchAdvice | None,
) -> tuple[str, ...]:
    """What the search says about its own answer."""
    words = [alike_words(chosen, fastest, len(result.alike(sweep_spread(chosen.workload))))]
    words += [headroom_words(chosen, result.headroom, faster)] if result.headroom else []
    words += [batch_words(batch)] if batch else []
    parallel = chosen.workload.parallel
    group = microbatch_group(parallel.pp, chosen.workload.microbatches) if question.framework == "megatron" else None
    if parallel.vpp > 1 and group is not None and group != parallel.pp:
        words.append(
            f"Megatron takes its microbatches in groups of {group}: --microbatch-group-size-per-vp-stage {group}."
        )
    return tuple(words)


def _memory_reasons(chosen: Prediction, saved: Sequence[SwitchedOn], sharding: str) -> tuple[str, ...]:
    found = [sharding] if sharding else []
    if saved:
        found.append(savings_words(chosen, saved))
    elif not chosen.memory.fits and chosen.workload.is_own:
        found.append(would_fit_words(chosen, cheapest_fit(chosen.workload, chosen.memory.capacity)))
    return tuple(found)


def _freed(chosen: Prediction) -> Iterator[Freed]:
    for saving in savings(chosen.workload):
        if why_not_started(saving.workload):
            continue
        slower = predict_time(saving.workload).step_seconds / chosen.time.step_seconds - 1
        yield Freed(saving.name, saving.bytes, slower)


def _launch(workload: Workload, question: Question) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The line that starts it, and what it lacks; no line where even the nearest run is one that `check` refuses."""
    beyond = tuple(beyond_moefold(workload))
    if beyond and not workload.is_own:
        try:
            nearest = override(question.run, changes_to_run(with_stages(workload), question.run))
            refused = problems(nearest, question.cluster.num_gpus)
        except ProblemsError as error:
            refused = list(error.problems)
        if refused:
            return (), (*beyond, f"and the nearest run is none ({refused[0]})")
    return command_for(workload, question), beyond


def command_for(workload: Workload, question: Question) -> tuple[str, ...]:
    """The line that starts it."""
    workload = with_stages(workload)
    wanted = changes_to_run(workload, question.named or question.run)
    asked = {path: value for path, value in question.dotted.items() if path not in wanted}
    return (*launch_words(workload, question.name, asked | wanted), *_to_fill_in(question.run))


def _to_fill_in(run: RunConfig) -> Iterator[str]:
    """What plans can do without and training needs, and only the user can say: tokens, the number of steps, the lr."""
    missing = [problem.path for rule in RULES_TO_TRAIN if isinstance(problem := rule(run), Problem)]
    return (f"--{path} {_PLACEHOLDERS[path]}" for path in missing)


def _own(question: Question) -> tuple[Workload | None, ProblemsError | None]:
    try:
        workload = workload_of_run(question.run, question.cluster, question.imbalance)
    except ProblemsError as error:
        return None, error
    return with_framework(workload, question.framework, question.release), None


def _without_layout(question: Question) -> Workload:
    """The run's model, batch and formats without a layout of its own: what a search begins with."""
    one = dict.fromkeys(("tp", "cp", "pp", "vpp", "ep", "etp", "dp_replicate", "edp_replicate"), 1)
    run = Workload(question.run, question.cluster, imbalance=question.imbalance)
    return changed(run, parallel={**one, "stages": None}, data={"micro_batch": 1})


def with_framework(workload: Workload, framework: FrameworkName, release: str = "") -> Workload:
    """The same work under another framework, which keeps other things."""
    if framework == "moefold":
        return workload
    sharded = framework == "fsdp2"
    precision = workload.run.precision
    if not sharded:
        precision = replace(MEGATRON_PRECISION, compute=precision.compute, recipe=precision.recipe)
    # As its command says.
    made = Framework(framework, release, fused_router=framework == "megatron")
    return changed(
        replace(workload, run=replace(workload.run, precision=precision), framework=made),
        parallel={"sharding": "fsdp" if sharded else "zero1", "dp_replicate": 1, "edp_replicate": 1},
    )


def _reasons(
    chosen: Prediction,
    runner_up: Prediction | None,
    own: Prediction | None,
    result: Result | None,
    asked: Sequence[Answer],
) -> list[str]:
    paragraphs = [wall_words(chosen), what_would_move(chosen, asked)]
    if (reason := why_not_started(chosen.workload)) is not None:
        # Only a layout that was not searched.
        paragraphs.append(f"This layout does not start: {reason}.")
    if runner_up is not None:
        paragraphs.append(versus(chosen, runner_up, "The runner-up"))
    if words := rank_order_words(chosen.workload):
        paragraphs.append(words)
    if own is not None and _layout(own.workload) != _layout(chosen.workload):
        paragraphs.append(versus(chosen, own, "Your own layout"))
    spare = 1 - chosen.memory.total / chosen.memory.capacity
    if 0 <= spare < _TIGHT:
        paragraphs.append(_tight(chosen, result, spare))
    return paragraphs


def _layout(workload: Workload) -> tuple[LayoutChoice, str | None]:
    return choice_of_workload(workload), workload.parallel.stages


def _tight(chosen: Prediction, result: Result | None, spare: float) -> str:
    words = f"Memory is tight: {spare:.1%} of the GPU is left, less than the prediction's own error."
    roomy = next(
        (each for each in (result.pareto if result else ()) if each.bytes < 0.9 * chosen.memory.capacity), None
    )
    if roomy is None:
        return words
    slower = roomy.seconds / chosen.time.step_seconds - 1
    return f"{words} The fastest with a tenth to spare is {slower:.1%} slower and holds {format_bytes(roomy.bytes)}."


def _faults(question: Question) -> Faults:
    gpus = question.cluster.num_gpus
    # Every state is saved once, by its primary replica.
    each = 12.0 * count_parameters(question.run.model).total / gpus
    save, write = question.save_seconds, question.write_seconds
    return faults_of(
        gpus,
        question.mtbf_hours,
        save=each / (question.cluster.gpu.host_gb_s * 1e9) + 1.0 if save is None else save,
        write=each / (STORAGE_GB_S * 1e9) if write is None else write,
        restart=question.restart_seconds,
    )
