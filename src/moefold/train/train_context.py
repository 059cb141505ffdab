"""What a rank needs before its first step, built in one order: groups, local model, optimizer, data, checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from moefold.checkpoint.load import from_rank_0, load_latest
from moefold.checkpoint.run_lock import take_incarnation
from moefold.checkpoint.save import Saver
from moefold.checkpoint.state_dict import fresh_seed, run_record
from moefold.comm.process_groups import Groups
from moefold.config.loading import dump_run
from moefold.config.run import RunConfig
from moefold.data.samples import AnySamples, PairSamples, open_samples
from moefold.data.token_origin import TRAINABLE, origin_problems
from moefold.errors import ConfigError, TrainingError
from moefold.moe.routing_policies import PolicyOrName
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of, init_main_weights
from moefold.pipeline.step import make_optimizer
from moefold.train.dpo import Preferences, load_preferences
from moefold.train.state import TrainState


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
    # With `train.dpo`: the reference, and the loss of pairs.
    preferences: Preferences | None = None

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
) -> tuple[TrainContext, TrainState]:
    """Build this rank's part, and load the newest checkpoint that verifies, if there is one."""
    directory = run_directory(run)
    kinds = TRAINABLE if run.train.dpo is None else ("preference",)
    if problems := origin_problems(run.data, run.model.vocab_size, directory / "tokenizer", kinds):
        raise ConfigError(*problems)
    groups = groups_of(run, world, rank, timedelta(seconds=seconds))
    incarnation = from_rank_0(take_incarnation(directory) if rank == 0 else 0, groups["world"])
    if rank == 0:
        (directory / "config.yaml").write_text(dump_run(run))
    local_model = build_local_model(run, groups, device, routing_policy=routing_policy)
    optimizer = make_optimizer(local_model)
    init_main_weights(local_model, optimizer)
    open_order = open_samples if run.train.dpo is None else PairSamples
    samples = open_order(run.data, run.model.vocab_size, run.seed, "train")
    validation = (
        None if run.data.validation is None else open_samples(run.data, run.model.vocab_size, run.seed, "validation")
    )
    saver = make_saver(local_model, directory, incarnation, device)
    # Before the policy: what is loaded last decides the random state.
    preferences = load_preferences(run, local_model)
    context = TrainContext(run, directory, device, local_model, optimizer, samples, validation, saver, preferences)
    return context, _resume(context)


def make_saver(local_model: LocalModel, directory: Path, incarnation: int, device: torch.device) -> Saver:
    saving, world = local_model.run.train.saving, local_model.groups["world"]
    return Saver(
        directory / "checkpoints",
        world,
        incarnation,
        saving.keep,
        saving.keep_every,
        saving.background,
        about=run_record(local_model),
        device=device,
    )


def _resume(context: TrainContext) -> TrainState:
    found = load_latest(context.directory / "checkpoints", context.local_model, context.optimizer)
    if found is None:
        # Checkpoints hold the generator's state, which must not differ between two first starts.
        torch.manual_seed(fresh_seed(context.run.seed, 0, context.groups.rank))
        return TrainState()
    path, loaded = found
    saved, ours = loaded.get("data"), context.samples.fingerprint
    if saved is not None and saved != ours:
        raise TrainingError(
            f"{path} was written while training on other data (fingerprint {str(saved)[:12]}, now {ours[:12]}): files, "
            "weights, seed, seq_len or documents changed; restore them, or start a run of another name from its weights"
        )
    # Converted weights come without a position in the data: training starts at step 0.
    return TrainState.from_json(loaded["train"]) if "train" in loaded else TrainState()
