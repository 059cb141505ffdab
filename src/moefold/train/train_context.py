"""Everything a rank needs before its first step, made in one order: groups, share, optimizer, data, checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.optim import Optimizer

from moefold.blueprint.parameters import parameters
from moefold.checkpoint.load import from_rank_0, load_latest
from moefold.checkpoint.run_lock import take_incarnation
from moefold.checkpoint.save import Saver
from moefold.checkpoint.state_dict import about_run, fresh_seed
from moefold.comm.process_groups import Groups
from moefold.config.loading import dump_run
from moefold.config.run import RunConfig
from moefold.data.document_samples import AnySamples, open_samples
from moefold.errors import TrainingError
from moefold.optim.adamw import adamw
from moefold.parallel.parallelize import Share, groups_of, take_share
from moefold.train.state import TrainState


@dataclass(frozen=True)
class Workshop:
    """What the loop works with; nothing in it is replaced while the run lasts."""

    run: RunConfig
    directory: Path
    device: torch.device
    share: Share
    optimizer: Optimizer
    samples: AnySamples
    validation: AnySamples | None
    saver: Saver

    @property
    def groups(self) -> Groups:
        return self.share.groups

    @property
    def leads(self) -> bool:
        return self.groups.rank == 0


def run_directory(run: RunConfig) -> Path:
    return Path(run.train.directory) / run.name


def set_up(run: RunConfig, rank: int, world: int, device: torch.device, seconds: float) -> tuple[Workshop, TrainState]:
    """Build this rank's part, and take up the newest checkpoint that verifies, if there is one."""
    groups = groups_of(run, world, rank, timedelta(seconds=seconds))
    directory = run_directory(run)
    incarnation = from_rank_0(take_incarnation(directory) if rank == 0 else 0, groups["world"])
    if rank == 0:
        (directory / "config.yaml").write_text(dump_run(run))
    share = take_share(run, groups, device)
    optimizer = make_optimizer(share)
    samples = open_samples(run.data, run.model.vocab_size, run.seed, "train")
    validation = (
        None if run.data.validation is None else open_samples(run.data, run.model.vocab_size, run.seed, "validation")
    )
    saver = make_saver(share, directory, incarnation, device)
    workshop = Workshop(run, directory, device, share, optimizer, samples, validation, saver)
    return workshop, _resume(workshop)


def make_optimizer(share: Share) -> Optimizer:
    kinds = {spec.name: spec.kind for spec in parameters(share.run.model)}
    return adamw(((parameter, kinds[name]) for name, parameter in share.model.named_parameters()), share.run.optim)


def make_saver(share: Share, directory: Path, incarnation: int, device: torch.device) -> Saver:
    saving, world = share.run.train.saving, share.groups["world"]
    return Saver(
        directory / "checkpoints",
        world,
        incarnation,
        saving.keep,
        saving.keep_every,
        saving.background,
        about=about_run(share),
        device=device,
    )


def _resume(workshop: Workshop) -> TrainState:
    found = load_latest(workshop.directory / "checkpoints", workshop.share, workshop.optimizer)
    if found is None:
        # Checkpoints hold the generator's state, which would otherwise differ from one first start to the next.
        torch.manual_seed(fresh_seed(workshop.run.seed, 0, workshop.groups.rank))
        return TrainState()
    path, loaded = found
    saved, ours = loaded.get("data"), workshop.samples.fingerprint
    if saved is not None and saved != ours:
        raise TrainingError(
            f"{path} was written while training on other data (fingerprint {str(saved)[:12]}, now {ours[:12]}): files, "
            "weights, seed, seq_len or documents changed; restore them, or start a run of another name from its weights"
        )
    # Weights that came from elsewhere have no position: training starts at its own beginning.
    return TrainState.from_json(loaded["train"]) if "train" in loaded else TrainState()
