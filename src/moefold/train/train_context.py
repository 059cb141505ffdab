"""What a rank needs before its first step, built in one order: groups, local model, optimizer, data, checkpoint."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import torch

from moefold.checkpoint.files import is_full, naming, read_bounded
from moefold.checkpoint.host_files import HostRanks
from moefold.checkpoint.load import from_rank_0, load_latest
from moefold.checkpoint.memory_copies import MemoryCopies, remove_copies
from moefold.checkpoint.object_store import open_store
from moefold.checkpoint.run_lock import take_incarnation
from moefold.checkpoint.save import Saver
from moefold.checkpoint.save_failures import FailurePolicy
from moefold.checkpoint.state_dict import fresh_seed, run_record
from moefold.checkpoint.step_dirs import committed_steps
from moefold.checkpoint.upload import Uploader, fetch_newer, take_uploading_incarnation
from moefold.checkpoint.upload_log import UploadLog
from moefold.checks.sizes import leaves
from moefold.comm.heartbeat import Heartbeat
from moefold.comm.launchers import is_first_of_host
from moefold.comm.process_groups import Groups
from moefold.config.loading import dump_run, dump_value, load_run_file
from moefold.config.run import RunConfig
from moefold.data.samples import AnySamples, PairSamples, open_samples
from moefold.data.token_origin import problems_of_run
from moefold.data.verification import DamageLog, Verifier
from moefold.errors import CheckpointError, ConfigError, MoefoldError, TrainingError
from moefold.moe.routing_policies import PolicyOrName
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of, init_main_weights
from moefold.parallel.router_replay import replay_routing_of_batches
from moefold.pipeline.step import make_optimizer
from moefold.plan.elastic_layout import ElasticLayout
from moefold.precision.loss_scaling import resumed_loss_scale
from moefold.private_files import OWN_MODE, replace_file, who_else
from moefold.redaction import Redactor
from moefold.train.dpo import Preferences, load_preferences
from moefold.train.fault_tolerance.signals import print_stderr
from moefold.train.profile.step_profiler import StepProfiler
from moefold.train.routing_trace import FOLDER, RoutingTrace, TraceWriter, recorded_steps, trace_info
from moefold.train.state import TrainState
from moefold.units import format_bytes

SETTINGS, HISTORY = "config.yaml", "config_history.jsonl"
_MAX_HISTORY = 64 << 20


@dataclass(frozen=True)
class TrainContext:
    """What the loop works with; its fields do not change during the run."""

    run: RunConfig
    directory: Path
    device: torch.device
    local_model: LocalModel
    optimizer: ModelOptimizer
    samples: AnySamples
    validation: AnySamples | None
    saver: Saver
    # With `train.saving.upload`.
    uploads: Uploader | None = None
    # With `train.saving.memory_every`.
    memory: MemoryCopies | None = None
    # With `train.dpo`: the reference, and the loss of pairs.
    preferences: Preferences | None = None
    # Where this rank is; a launcher on this host reads it.
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    # Compares token files with their hashes, on one rank of each host.
    verifier: Verifier = field(default_factory=Verifier)
    # The run and its ranks as they were asked for, where it goes on with fewer.
    asked: ElasticLayout | None = None
    # With `train.profile.every`.
    profiler: StepProfiler | None = None
    # With `train.routing_trace`.
    routing_writer: TraceWriter | None = None
    replayed: RoutingTrace | None = None

    @property
    def groups(self) -> Groups:
        return self.local_model.groups

    @property
    def leads(self) -> bool:
        return self.groups.rank == 0


def run_directory(run: RunConfig) -> Path:
    return Path(run.train.directory) / run.name


def build_train_context(
    run: RunConfig,
    rank: int,
    world: int,
    device: torch.device,
    seconds: float,
    routing_policy: PolicyOrName | None = None,
    heartbeat: Heartbeat | None = None,
    asked: ElasticLayout | None = None,
    node: int = 0,
) -> tuple[TrainContext, TrainState]:
    """Build this rank's part, and load the newest checkpoint that verifies, if there is one.

    ``node``: the number of this host, where launchers have numbers.

    ``asked``: the run and its ranks as they were asked for, where ``run`` and ``world`` are others. The run's
    configuration remains what was asked for, so that the next start with all ranks has the layout of the first.
    """
    heartbeat = Heartbeat() if heartbeat is None else heartbeat
    directory = run_directory(run)
    if problems := problems_of_run(run):
        raise ConfigError(*problems)
    groups = groups_of(run, world, rank, timedelta(seconds=seconds))
    heartbeat.attach(groups.communicators())
    groups["world"].ledger.on_record = heartbeat.collective
    log = None if run.train.saving.upload is None else UploadLog(open_store(run.train.saving.upload, run.name))
    incarnation = from_rank_0(_take_incarnation(directory, log) if rank == 0 else 0, groups["world"])
    root = directory / "checkpoints"
    context = open_context(run, directory, groups, device, incarnation, root, routing_policy, heartbeat)
    if log is not None:
        saving = run.train.saving
        uploads = Uploader(
            log, directory, groups["world"], incarnation, saving.keep, saving.keep_every, say=print_redacted
        )
        context = replace(context, uploads=uploads)
        fetch_newer(log, root, groups["world"], incarnation, print_redacted)
    context = replace(context, memory=_open_memory(context, incarnation, node))
    # Before the fingerprint is compared, which does not say where a file was changed.
    context = replace(context, verifier=open_verifier(context), asked=asked)
    if run.train.profile.every > 0:
        context = replace(context, profiler=StepProfiler(context.local_model, heartbeat, directory))
    context = replace(context, routing_writer=_open_routing_writer(context))
    state = _resume(context)
    # After the checkpoint was loaded: settings that do not belong to it are refused, and change nothing.
    if rank == 0:
        for line in record_settings(run if asked is None else asked.run, directory):
            print_stderr(line)
    return context, state


def _take_incarnation(directory: Path, log: UploadLog | None) -> int:
    if log is None:
        return take_incarnation(directory)
    return take_uploading_incarnation(log, directory, print_redacted)


def print_redacted(sentence: str) -> None:
    """Messages of a storage library may have addresses and keys in them."""
    print_stderr(Redactor(os.environ).text(sentence))


def open_context(
    run: RunConfig,
    directory: Path,
    groups: Groups,
    device: torch.device,
    incarnation: int,
    checkpoints: Path,
    routing_policy: PolicyOrName | None = None,
    heartbeat: Heartbeat | None = None,
) -> TrainContext:
    """A run at its beginning; it would write its checkpoints to ``checkpoints``."""
    heartbeat = Heartbeat() if heartbeat is None else heartbeat
    local_model = build_local_model(run, groups, device, routing_policy=routing_policy)
    optimizer = make_optimizer(local_model)
    init_main_weights(local_model, optimizer)
    open_order = open_samples if run.train.dpo is None else PairSamples
    samples = open_order(run.data, run.model.vocab_size, run.seed, "train")
    validation = (
        None if run.data.validation is None else open_samples(run.data, run.model.vocab_size, run.seed, "validation")
    )
    saver = make_saver(local_model, checkpoints, incarnation, device)
    # Before the policy: what is loaded last decides the random state.
    preferences = load_preferences(run, local_model)
    return TrainContext(
        run,
        directory,
        device,
        local_model,
        optimizer,
        samples,
        validation,
        saver,
        preferences=preferences,
        heartbeat=heartbeat,
        replayed=_open_replayed(run, local_model, samples),
    )


def _open_routing_writer(context: TrainContext) -> TraceWriter | None:
    """Every rank records as many steps as rank 0 finds missing."""
    steps, directory = context.run.train.routing_trace.steps, context.directory / FOLDER
    if not steps:
        return None
    info = trace_info(context.run, context.samples.fingerprint)
    left = from_rank_0(max(steps - recorded_steps(directory), 0) if context.leads else 0, context.groups["world"])
    if context.leads:
        each = info.step_bytes(context.run.data.global_batch * context.run.data.seq_len)
        said = f"routing of the next {left} steps is recorded in {directory}, at most {format_bytes(each)} per step"
        print_stderr(said if left else f"routing: {directory} has {steps} steps or more, and none is added")
    return TraceWriter(context.local_model, directory, info, left)


def _open_replayed(run: RunConfig, local_model: LocalModel, samples: AnySamples) -> RoutingTrace | None:
    """With every router told to take what batches bring along."""
    if run.train.routing_trace.replay is None:
        return None
    trace = RoutingTrace(Path(run.train.routing_trace.replay))
    trace.require(trace_info(run, samples.fingerprint))
    replay_routing_of_batches(local_model)
    return trace


def open_verifier(context: TrainContext) -> Verifier:
    """The comparison of this rank: on the first of each host in the background; on all where damage is skipped."""
    data, rank, world = context.run.data, context.groups.rank, context.groups["world"]
    steps = committed_steps(context.directory / "checkpoints") if rank == 0 else []
    steps += committed_steps(context.memory.root) if rank == 0 and context.memory is not None else []
    newest = from_rank_0(max(steps, default=0), world)
    background, skips = is_first_of_host(os.environ, rank, world.size), data.verification.on_damage == "skip"
    if data.verification.mb_per_s <= 0 or not (background or skips):
        return Verifier()
    splits = {"train": context.samples} | ({} if context.validation is None else {"validation": context.validation})
    log = DamageLog(context.directory, rank, print_stderr)
    verifier = Verifier(
        splits,
        context.directory,
        data.verification,
        keeps_record=rank == 0,
        resumed=newest > 0,
        background=background,
        say=print_stderr,
        on_damage=lambda damage: log.write(str(damage)),
    )
    verifier.compare_with_record()
    if skips:
        for split, samples in splits.items():
            samples.on_read(partial(verifier.check_now, split), log.skipped)
    return verifier


def record_settings(run: RunConfig, directory: Path) -> Iterator[str]:
    """Write config.yaml, which holds the settings of the last start; returns what to tell the user.

    A start from config.yaml takes whatever the start before it was given, so no change is silent: it is printed, its
    former values are kept in config_history.jsonl, and later starts name the settings that differ from the first.
    """
    path, history = directory / SETTINGS, directory / HISTORY
    if (who := who_else(os.stat(directory))) is not None:
        yield f"{directory} {who}, who can replace its checkpoints"
    kept = read_bounded(history, _MAX_HISTORY) if history.exists() else b""
    changed: dict[str, list[str]] = {}
    if path.exists():
        try:
            changed = changed_settings(load_run_file(path), run)
        except MoefoldError as error:
            changed = {SETTINGS: [path.read_text(encoding="utf-8", errors="replace"), "the settings of this start"]}
            yield f"{path} cannot be compared with this start: {error}; its text is kept in {history.name}"
    if changed:
        line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "changed": changed}
        kept += (json.dumps(line) + "\n").encode()
    # The history first: settings are kept there before they are replaced.
    files = {history: kept} if changed else {}
    full = _write_own(files | {path: dump_run(run).encode()})
    if changed and SETTINGS not in changed:
        said = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())
        where = f"and kept in {path}" if full is None else "for this start alone"
        yield f"settings changed since the last start, {where}: {said}"
    if full is not None and (changed or not path.exists()):
        yield f"warning: the settings of this start could not be written: {full}; training goes on"
    first: dict[str, str] = {}
    for text in kept.splitlines():
        for key, (old, _) in json.loads(text)["changed"].items():
            first.setdefault(key, old)
    values = {key: dump_value(value) for key, value in leaves(run)} if first else {}
    said = ", ".join(
        f"{key} {old} -> {values.get(key, 'null')}"
        for key, old in first.items()
        if key not in changed and key != SETTINGS and values.get(key, "null") != old
    )
    if said:
        yield f"settings that differ from those this run began with ({history.name}): {said}"


def _write_own(files: Mapping[Path, bytes]) -> CheckpointError | None:
    """In this order; returns why not, if the disk is full, which is no reason not to train."""
    try:
        for path, content in files.items():
            with naming(path):
                replace_file(path, content, OWN_MODE)
    except CheckpointError as error:
        if is_full(error):
            return error
        raise
    return None


def changed_settings(before: RunConfig, after: RunConfig) -> dict[str, list[str]]:
    """Dotted key -> [old, new], as in YAML; a key of a section that is not there is null."""
    # A restart has the settings of the start before it, and is to be quick.
    if before == after:
        return {}
    old, new = ({key: dump_value(value) for key, value in leaves(run)} for run in (before, after))
    pairs = {key: [old.get(key, "null"), new.get(key, "null")] for key in old | new}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def make_saver(local_model: LocalModel, checkpoints: Path, incarnation: int, device: torch.device) -> Saver:
    saving, world = local_model.run.train.saving, local_model.groups["world"]
    return Saver(
        checkpoints,
        world,
        incarnation,
        saving.keep,
        saving.keep_every,
        saving.background,
        about=run_record(local_model),
        device=device,
        policy=FailurePolicy(
            saving.retries, saving.retry_after, saving.on_failure, saving.max_failures, saving.free_space
        ),
    )


def _open_memory(context: TrainContext, incarnation: int, node: int) -> MemoryCopies | None:
    if context.run.train.saving.memory_every <= 0:
        # A later start that has it on must not find copies of a state that this one does not continue.
        remove_copies(context.directory, node)
        return None
    world = context.groups["world"]
    hosts = HostRanks.agreed(f"{socket.gethostname()}/{node}", world)
    about = run_record(context.local_model)
    return MemoryCopies(context.directory, node, hosts, world, incarnation, about, context.device)


def _resume(context: TrainContext) -> TrainState:
    root, memory = context.directory / "checkpoints", context.memory
    if memory is not None:
        copied = memory.restore(root, context.local_model, context.optimizer, print_stderr)
        state = None if copied is None else position_of(context, *copied)
        if context.leads and state is not None:
            print_stderr(f"resuming at step {state.step} from the copy in memory")
        memory.forget_after(-1 if state is None else state.step)
        if state is not None:
            return state
    found = load_latest(root, context.local_model, context.optimizer)
    if found is None:
        return first_state(context)
    if context.uploads is not None:
        context.uploads.begin_if_missing(found[0])
    return position_of(context, *found)


def first_state(context: TrainContext) -> TrainState:
    """Checkpoints hold the generator's state, which must not differ between two first starts."""
    torch.manual_seed(fresh_seed(context.run.seed, 0, context.groups.rank))
    return TrainState(loss_scale=resumed_loss_scale(context.run.precision.loss_scaling, None))


def position_of(context: TrainContext, path: Path, loaded: Mapping[str, object]) -> TrainState:
    """The state of the loop in a checkpoint; refuses one of other data."""
    saved, ours = loaded.get("data"), context.samples.fingerprint
    if saved is not None and saved != ours:
        raise TrainingError(
            f"{path} was written while training on other data (fingerprint {str(saved)[:12]}, now {ours[:12]}): files, "
            "weights, seed, seq_len or documents changed; restore them, or start a run of another name from its weights"
        )
    # Converted weights come without a position in the data: training starts at step 0.
    if not isinstance(saved_state := loaded.get("train", {}), Mapping):
        raise CheckpointError(f"{path}: the trainer's state is not what this version writes")
    state = TrainState.from_json(saved_state) if "train" in loaded else TrainState()
    return replace(state, loss_scale=resumed_loss_scale(context.run.precision.loss_scaling, state.loss_scale))
