"""Rules about a training run: its name, its lr schedule, how the batch divides into microbatches, its tokens, Muon."""

from __future__ import annotations

import os
from math import isfinite, isnan
from urllib.parse import unquote, urlsplit

from moefold.blueprint.param_groups import unmatched
from moefold.blueprint.parameters import parameters
from moefold.checks.sizes import divides, divisors, leaves
from moefold.config.attention import GQAConfig
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.redaction import REDACTED
from moefold.topology.folded_layout import FoldedLayout

_LONGEST_NAME = 100


def name_is_one_word(run: RunConfig) -> Problem | None:
    return name_problem(run.name, "name")


def name_problem(name: str, path: str) -> Problem | None:
    """A run's name becomes a directory: it must not point outside of `train.directory`, be taken for an option, or
    change what a terminal shows."""
    wrong = {
        "is empty": not name,
        "begins with a dot or a dash": name.startswith((".", "-")),
        "has a path separator": bool(set(name) & set("/\\")),
        "has control characters": not name.isprintable(),
        f"has more than {_LONGEST_NAME} bytes": len(name.encode(errors="replace")) > _LONGEST_NAME,
    }
    found = " and ".join(what for what, is_so in wrong.items() if is_so)
    fix = f"use at most {_LONGEST_NAME} letters, digits, _ and -, of which a letter comes first"
    shown = repr(name) if len(name) <= _LONGEST_NAME else f"{name[:20]!r}..."
    return Problem(path, f"{shown} is not the name of a directory: it {found}", fix) if found else None


def addresses_are_whole(run: RunConfig) -> list[Problem]:
    """Logins of addresses are left out of config.yaml; whoever starts from it gives the address again."""
    found = [(path, value) for path, value in leaves(run) if isinstance(value, str)]
    found += [(f"data.mixture.{number}.path", source.path) for number, source in enumerate(run.data.mixture)]
    fix = "give the whole address again, as when the run was first started"
    return [
        Problem(path, f"{value}: its login was left out when it was written down", fix)
        for path, value in found
        if REDACTED in value
    ]


def lr_phases_are_a_whole_run(run: RunConfig) -> Problem | None:
    schedule = run.optim.lr_schedule
    if (schedule.kind == "phases") != bool(schedule.phases):
        wrong = "there are none" if not schedule.phases else f"are not used by kind {schedule.kind}"
        return Problem("optim.lr_schedule.phases", wrong, "use them with kind: phases, and with no other")
    if not schedule.phases:
        return None
    if schedule.floor:
        return Problem("optim.lr_schedule.floor", f"is {schedule.floor:g}", "use 0: each phase says where it ends")
    if any(not (phase.share > 0 and isfinite(phase.to) and phase.to >= 0) for phase in schedule.phases):
        return Problem(
            "optim.lr_schedule.phases", "a share or an end is negative", "use positive shares, and ends from 0"
        )
    total = sum(phase.share for phase in schedule.phases)
    if abs(total - 1) < 1e-6:
        return None
    return Problem("optim.lr_schedule.phases", f"their shares add up to {total:g}", "use shares that add up to 1")


def lr_schedule_fits_into_the_run(run: RunConfig) -> Problem | None:
    schedule, steps = run.optim.lr_schedule, run.train.steps
    if not steps:
        return None
    needed = schedule.warmup + (schedule.decay if schedule.kind == "wsd" else 0)
    if needed <= steps:
        return None
    parts = {"warmup": schedule.warmup} | ({"decay": schedule.decay} if schedule.kind == "wsd" else {})
    what = f"{' + '.join(parts)} = {' + '.join(map(str, parts.values()))}"
    return Problem(
        "optim.lr_schedule", f"{what} is longer than the run of {steps} steps", f"use at most {steps} in all"
    )


def lr_ends_at_or_below_the_peak(run: RunConfig) -> Problem | None:
    floor = run.optim.lr_schedule.floor
    return None if floor <= 1 else Problem("optim.lr_schedule.floor", f"is {floor:g} times the peak", "use 0 to 1")


def parameter_groups_have_parameters(run: RunConfig) -> list[Problem]:
    """A pattern that matches nothing is a typing error, which training would not show."""
    groups = run.optim.groups
    if not groups:
        return []
    names = [spec.name for spec in parameters(run.model)]
    found = []
    for number, before in unmatched(groups, names).items():
        path, pattern = f"optim.groups.{number}.match", groups[number].match
        if before is None:
            message, fix = f"{pattern!r} matches no parameter", f"use names such as {names[1]}, with * for any part"
        else:
            message = f"every parameter that {pattern!r} matches is in group {before} ({groups[before].match!r})"
            fix = "put the narrower pattern first: the first match counts"
        found.append(Problem(path, message, fix))
    return found


def parameter_groups_have_usable_numbers(run: RunConfig) -> list[Problem]:
    found = []
    for number, group in enumerate(run.optim.groups):
        for name, value in (("lr_scale", group.lr_scale), ("weight_decay", group.weight_decay)):
            if value is not None and not (isfinite(value) and value >= 0):
                path = f"optim.groups.{number}.{name}"
                found.append(Problem(path, f"is {value:g}", "use 0 or a positive number"))
    return found


def microbatches_fill_the_batch(run: RunConfig) -> Problem | None:
    data = run.data
    if data.packing == "bin_packed" or divides(data.micro_batch, data.global_batch):
        return None
    return Problem(
        "data.micro_batch",
        f"{data.global_batch} sequences of a step do not divide into microbatches of {data.micro_batch}",
        f"use {divisors(data.global_batch)}",
    )


def every_rank_gets_as_many_microbatches(run: RunConfig, layout: FoldedLayout) -> Problem | None:
    data, dp = run.data, layout.size("dp")
    one_round = data.micro_batch * dp
    if data.packing == "bin_packed":
        return None
    if divides(one_round, data.global_batch) or not divides(data.micro_batch, data.global_batch):
        return None
    return Problem(
        "data.global_batch",
        f"{data.global_batch} sequences do not divide over micro_batch * dp = {data.micro_batch} * {dp} = {one_round}",
        f"use a multiple of {one_round}, such as {-(-data.global_batch // one_round) * one_round}",
    )


def mixture_weights_are_positive(run: RunConfig) -> list[Problem]:
    found: list[Problem] = []
    for number, source in enumerate(run.data.mixture):
        if not isfinite(source.weight) or source.weight < 0:
            path = f"data.mixture.{number}.weight"
            found.append(Problem(path, f"is {source.weight:g}", "use 0 or a positive number"))
    if run.data.mixture and not any(source.weight > 0 or isnan(source.weight) for source in run.data.mixture):
        found.append(Problem("data.mixture", "no source has a positive weight", "give at least one"))
    return found


def training_has_tokens(run: RunConfig) -> Problem | None:
    if run.data.sources:
        return None
    return Problem(
        "data.train",
        "names no tokens to train on",
        "use --data.train FOLDER, made by `moefold tokenize FILES --out FOLDER`; `builtin` is a toy corpus of bytes",
    )


def validation_is_of_the_trained_kind(run: RunConfig) -> Problem | None:
    """A recipe's toy corpus must not stay behind as validation data when a user names tokens."""
    paths = [source.path for source in run.data.sources]
    if run.data.validation != "builtin" or not paths or "builtin" in paths:
        return None
    return Problem(
        "data.validation",
        f"is the builtin toy corpus, but the run trains on {paths[0]}",
        "use --data.validation FOLDER, or --data.validation null for no validation",
    )


def uploads_have_another_place(run: RunConfig) -> Problem | None:
    """Its text is printed and kept in config.yaml, so a login in it would be too; it is not repeated here."""
    url = run.train.saving.upload
    if url is None:
        return None
    path, fix = "train.saving.upload", "use file:///DIRECTORY, or s3://BUCKET/PREFIX"
    try:
        parts = urlsplit(url)
    except ValueError:
        return Problem(path, "is not a URL", fix)
    if "@" in parts.netloc or parts.query or parts.fragment:
        wrong = "has a login, a query or a fragment, which would be written into config.yaml"
        return Problem(path, wrong, "leave it out: the storage library reads logins from AWS_... variables or ~/.aws")
    if parts.scheme == "file":
        own = os.path.abspath(run.train.directory)
        if parts.netloc or not parts.path.strip("/"):
            return Problem(path, f"{url!r} names no directory", fix)
        if os.path.abspath(unquote(parts.path)) == own:
            return Problem(
                path, f"is the directory of the runs themselves, {own}", "choose one on another disk or machine"
            )
        return None
    return None if parts.scheme and parts.netloc else Problem(path, f"{url!r} is not a URL of a storage", fix)


def training_has_an_end(run: RunConfig) -> Problem | None:
    if run.train.steps > 0:
        return None
    each = run.data.global_batch * run.data.seq_len
    return Problem(
        "train.steps",
        "does not say how long to train",
        f"use --train.steps N; a step has {each:,} tokens, so a billion take {-(-(10**9) // each):,} steps",
    )


def training_has_an_lr(run: RunConfig) -> Problem | None:
    # Below 0 is another problem.
    if run.optim.lr != 0:
        return None
    return Problem("optim.lr", "names no learning rate", "use --optim.lr X, such as 3e-4")


# Each waits twice as long as the one before.
_MAX_RETRIES = 20


def saves_are_retried_in_time(run: RunConfig) -> Problem | None:
    retries = run.train.saving.retries
    if retries <= _MAX_RETRIES:
        return None
    return Problem(
        "train.saving.retries",
        f"is {retries}, and the last of them would wait {run.train.saving.retry_after:,} * 2^{retries - 1} steps",
        f"use 0 to {_MAX_RETRIES}",
    )


# ---- Muon and QK-clip ----


def momentum_decays(run: RunConfig) -> Problem | None:
    momentum = run.optim.muon.momentum
    if run.optim.algorithm != "muon" or momentum < 1:
        return None
    return Problem("optim.muon.momentum", f"is {momentum:g}: old gradients would never fade", "use 0 to 0.99")


def momentum_is_kept_as_it_is(run: RunConfig) -> list[Problem]:
    """Muon keeps momentum in the format of the weights that it updates, and orthogonalises on the device."""
    if "muon" not in {run.optim.algorithm, *(group.algorithm for group in run.optim.groups)}:
        return []
    precision, found = run.precision, []
    if precision.moments not in (None, precision.params):
        found.append(("precision.moments", str(precision.moments), "null"))
    if precision.master == "remainder":
        found.append(("precision.master", "remainder", "null or float32"))
    if run.memory.optimizer == "cpu":
        found.append(("memory.optimizer", "cpu", "device or host"))
    return [
        Problem(path, f"{value} is not there for Muon's momentum", f"use {good}, or optim.algorithm adamw")
        for path, value, good in found
    ]


def clipped_logits_follow_from_weights(run: RunConfig) -> Problem | None:
    """QK-clip scales projections; a norm behind them would undo it."""
    attention = run.model.attention
    if run.optim.qk_clip is None or not isinstance(attention, GQAConfig) or attention.qk_norm == "none":
        return None
    return Problem(
        "optim.qk_clip",
        f"model.attention.qk_norm: {attention.qk_norm} normalises queries and keys after their projections, so scaling "
        "these changes no logit; the norm bounds logits itself",
        "use null, or model.attention.qk_norm none",
    )


def clipped_layers_have_logits(run: RunConfig) -> Problem | None:
    if run.optim.qk_clip is None or run.model.linear_attention is None:
        return None
    return Problem(
        "optim.qk_clip",
        "bounds logits of every layer, and layers of linear attention (model.linear_attention) have none",
        "use null",
    )


def clipped_weights_are_whole(run: RunConfig) -> Problem | None:
    if run.optim.qk_clip is None or run.precision.master != "remainder":
        return None
    return Problem(
        "optim.qk_clip",
        "scales weights, and with precision.master: remainder half of their digits are in the optimizer",
        "use precision.master null or float32",
    )


def slow_ranks_are_slower(run: RunConfig) -> Problem | None:
    ratio = run.train.stragglers.ratio
    if ratio < 1:
        return None
    return Problem("train.stragglers.ratio", f"peers that take {ratio:g} times as long are not faster", "use below 1")


def excluded_ranks_are_looked_for(run: RunConfig) -> list[Problem]:
    """A policy for what nothing looks for."""
    found = []
    if run.train.stragglers.on_found == "exclude" and not run.train.stragglers.window:
        fix = "use a window of some steps, such as 20"
        found.append(Problem("train.stragglers.on_found", "is exclude, and train.stragglers.window is 0", fix))
    if run.train.corruption.on_mismatch == "exclude" and not run.train.corruption.every:
        fix = "compare every so many steps, such as 100"
        found.append(Problem("train.corruption.on_mismatch", "is exclude, and train.corruption.every is 0", fix))
    return found


# Expert numbers of a trace are int16.
_MOST_TRACED_EXPERTS = 1 << 15


def traced_routing_is_a_list_of_experts(run: RunConfig) -> Problem | None:
    """Of every token, for a policy whose batches are forwarded once."""
    trace, moe = run.train.routing_trace, run.model.moe
    if not trace.steps and trace.replay is None:
        return None
    path = "train.routing_trace.steps" if trace.steps else "train.routing_trace.replay"
    if moe is None:
        return Problem(path, "is set, and the model has no MoE layer", "use 0 steps and no replay")
    if moe.router.kind == "expert_choice":
        why = "is set, and with model.moe.router.kind: expert_choice experts choose tokens, so none has a list of them"
        return Problem(path, why, "use another kind of router, or no trace")
    if moe.num_experts > _MOST_TRACED_EXPERTS:
        why = f"is set, and a trace has numbers of at most {_MOST_TRACED_EXPERTS:,} experts, not {moe.num_experts:,}"
        return Problem(path, why, "use 0 steps and no replay")
    if run.kernels.graphs != "none":
        why = f"is set, and with kernels.graphs: {run.kernels.graphs} a router is launched without the host"
        return Problem(path, why, "use kernels.graphs none, or no trace")
    if run.train.dpo is not None:
        why = "is set, and with train.dpo a batch is routed twice, by the policy and by its reference"
        return Problem(path, why, "use 0 steps and no replay")
    return None


def fewest_ranks_are_there(run: RunConfig, layout: FoldedLayout) -> Problem | None:
    fewest, world = run.train.elastic.min_world, layout.world
    if fewest is None or fewest <= world:
        return None
    message = f"is {fewest}, and here are {world} ranks"
    return Problem("train.elastic.min_world", message, f"use at most {world}, or start {fewest} ranks")


RULES = (
    name_is_one_word,
    lr_phases_are_a_whole_run,
    lr_schedule_fits_into_the_run,
    lr_ends_at_or_below_the_peak,
    parameter_groups_have_parameters,
    parameter_groups_have_usable_numbers,
    microbatches_fill_the_batch,
    mixture_weights_are_positive,
    saves_are_retried_in_time,
    momentum_decays,
    momentum_is_kept_as_it_is,
    clipped_logits_follow_from_weights,
    clipped_layers_have_logits,
    clipped_weights_are_whole,
    slow_ranks_are_slower,
    excluded_ranks_are_looked_for,
    traced_routing_is_a_list_of_experts,
    uploads_have_another_place,
)
# A run without tokens, a length or an lr can still be planned, dry-run and proved.
RULES_TO_TRAIN = (
    training_has_tokens,
    addresses_are_whole,
    validation_is_of_the_trained_kind,
    training_has_an_end,
    training_has_an_lr,
)
RULES_WITH_LAYOUT = (every_rank_gets_as_many_microbatches, fewest_ranks_are_there)
