"""From a Hugging Face directory and tokens to a run that is ready to be fine-tuned: weights at step 0, and its config.

The run is an ordinary one. Its directory holds the configuration, the tokenizer, and a checkpoint of step 0 that any
layout reads; with LoRA the checkpoint has the adapters too, whose B is zero. `moefold train` on its config.yaml does
the same as `moefold sft` on its name.

Defaults are those of published fine-tuning: every document is a sample and counts once per epoch, samples are packed
without one seeing another, the lr is a tenth or less of pretraining's and follows a cosine after a short warmup, there
is no weight decay, and no balance loss unless it is kept by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Literal

from torch import Tensor

from moefold.blueprint.param_counts import count_parameters
from moefold.blueprint.param_groups import is_trained
from moefold.blueprint.parameters import parameters
from moefold.checkpoint.files import naming
from moefold.checkpoint.hf.hf_config import HfConfig, run_for
from moefold.checkpoint.hf.hf_conversion import TOKENIZER, copy_tokenizer
from moefold.checkpoint.hf.hf_directory import HfDirectory
from moefold.checkpoint.hf.peft_adapters import read_adapters
from moefold.checkpoint.lora_weights import WithAdapters
from moefold.checkpoint.single_process import Progress, write_whole
from moefold.checkpoint.step_dirs import final_path
from moefold.config.data import DataConfig
from moefold.config.loading import dump_run, override
from moefold.config.model import LoraConfig, ModelConfig
from moefold.config.moe import BalanceConfig
from moefold.config.optim import LRScheduleConfig, OptimConfig
from moefold.config.run import RunConfig
from moefold.config.train import DpoConfig
from moefold.data.samples import PairSamples, open_samples
from moefold.errors import ConfigError, Problem
from moefold.private_files import OWN_MODE, replace_file
from moefold.train.dpo import reference_run

Balance = Literal["off", "keep"]
# Peak lr where none is given: all weights, and adapters.
FULL_LR, LORA_LR = 1e-5, 2e-4
# Of these, for DPO.
DPO_LR_SHARE = 0.1
# Tokens of a sample; longer documents are cut.
MAX_SEQ_LEN = 4096
GLOBAL_BATCH = 32
WARMUP_SHARE = 0.03
ROUTERS = "*.router.*"
# Where DPO's frozen copy is, in the run's directory.
REFERENCE = "reference"


@dataclass(frozen=True)
class Finetuning:
    """What is asked for; ``changes`` are dotted keys of the run, which win over every default."""

    name: str
    directory: Path
    # Token files, as `data.train` names them.
    tokens: str
    lora: LoraConfig | None = None
    # A directory of PEFT's format, to go on with its adapters.
    adapters: Path | None = None
    freeze_router: bool = False
    balance: Balance = "off"
    epochs: float = 1.0
    # DPO on preference pairs, with this beta; None: the next token's cross entropy.
    beta: float | None = None
    changes: Sequence[str] = ()


@dataclass(frozen=True)
class Prepared:
    """The run, and what was decided for it, for people."""

    run: RunConfig
    notes: tuple[str, ...]


def finetuning_run(found: HfConfig, asked: Finetuning) -> Prepared:
    """The configuration, without reading weights; the number of steps follows from the tokens."""
    run, lora = run_for(found, asked.name), asked.lora
    model, notes = _with_balance(run, found, asked.balance)
    seq_len = min(found.context, MAX_SEQ_LEN)
    frozen = (ROUTERS,) if asked.freeze_router and model.moe is not None and lora is None else ()
    run = replace(
        run,
        model=replace(model, lora=lora),
        data=DataConfig(seq_len=seq_len, global_batch=GLOBAL_BATCH, packing="bin_packed", train=asked.tokens),
        optim=OptimConfig(
            lr=(FULL_LR if lora is None else LORA_LR) * (1.0 if asked.beta is None else DPO_LR_SHARE),
            beta2=0.999,
            weight_decay=0.0,
            trained="all" if lora is None else "adapters",
            frozen=frozen,
            lr_schedule=LRScheduleConfig(kind="cosine"),
        ),
        kernels=replace(run.kernels, experts="auto"),
        train=replace(run.train, directory=str(asked.directory), dpo=_dpo(asked)),
    )
    run = override(run, list(asked.changes)) if asked.changes else run
    if run.train.steps == 0:
        run, note = _with_steps(run, asked)
        notes.append(note)
    return Prepared(run, (*notes, *_summary(run)))


def _dpo(asked: Finetuning) -> DpoConfig | None:
    """With adapters the reference is the model without them, else a copy beside the checkpoints."""
    if asked.beta is None:
        return None
    copied = asked.directory / asked.name / REFERENCE
    return DpoConfig(asked.beta, None if asked.lora is not None else str(final_path(copied, 0)))


def _with_balance(run: RunConfig, found: HfConfig, balance: Balance) -> tuple[ModelConfig, list[str]]:
    """Balance losses and the moving bias of routers, off or kept as config.json has them."""
    model, moe = run.model, run.model.moe
    if moe is None:
        return model, []
    moves, named = moe.router.expert_bias, moe.balance != BalanceConfig()
    if balance == "keep":
        if not named and not moves:
            fix = "use off, or set model.moe.balance.microbatch"
            raise ConfigError(Problem("--balance", "keep: config.json names no balance loss", fix))
        bias = ["the bias of routers moves against the load"] * moves
        return model, [*(f"balance kept: {note}" for note in (*found.training_notes, *bias))]
    router = replace(moe.router, bias_update_rate=0.0) if moves else moe.router
    off = ["balance losses of config.json"] * named + ["the moving bias of routers"] * moves
    notes = [f"balance off: {' and '.join(off)}; --balance keep follows"] if off else []
    return replace(model, moe=replace(moe, router=router, balance=BalanceConfig())), notes


def _with_steps(run: RunConfig, asked: Finetuning) -> tuple[RunConfig, str]:
    """So many epochs over the samples, and a warmup of a share of them unless the run says one."""
    open_order = open_samples if run.train.dpo is None else PairSamples
    count = len(open_order(run.data, run.model.vocab_size, run.seed))
    steps = max(1, ceil(asked.epochs * count / run.data.global_batch))
    schedule = run.optim.lr_schedule
    if not schedule.warmup:
        schedule = replace(schedule, warmup=min(steps - 1, ceil(WARMUP_SHARE * steps)))
    run = replace(run, train=replace(run.train, steps=steps), optim=replace(run.optim, lr_schedule=schedule))
    return run, f"{count:,} samples, {asked.epochs:g} epochs, {run.data.global_batch} per step: {steps:,} steps"


def _summary(run: RunConfig) -> list[str]:
    optim, lora = run.optim, run.model.lora
    counts = count_parameters(run.model)
    trained = sum(spec.size for spec in parameters(run.model) if is_trained(spec.name, optim))
    what = "all weights" if lora is None else f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}"
    if optim.frozen:
        what += f", frozen: {', '.join(optim.frozen)}"
    return [
        f"{what}: {trained:,} of {counts.total:,} parameters are trained",
        f"lr {optim.lr:g}, {optim.lr_schedule.kind} after {optim.lr_schedule.warmup} steps of warmup, weight decay "
        f"{optim.weight_decay:g}",
        f"samples of at most {run.data.seq_len:,} tokens, {run.data.packing}",
        *([] if run.train.dpo is None else [_reference_note(run.train.dpo)]),
    ]


def _reference_note(dpo: DpoConfig) -> str:
    where = "the model without its adapters" if dpo.reference is None else f"a frozen copy, {dpo.reference}"
    return f"DPO with beta {dpo.beta:g} against {where}"


def prepare(source: Path, asked: Finetuning, progress: Progress | None = None) -> Prepared:
    """Write the run's directory: config.yaml, the tokenizer, and step 0 with the weights of ``source``."""
    directory = HfDirectory(source)
    try:
        values: dict[str, Tensor] = {}
        if asked.adapters is not None:
            lora, values = read_adapters(asked.adapters, directory.config.model)
            asked = replace(asked, lora=lora)
        prepared = finetuning_run(directory.config, asked)
        run = prepared.run
        root = Path(run.train.directory) / run.name
        weights = WithAdapters(directory, run, values)
        origin = {"format": "huggingface", "family": directory.config.model_type}
        write_whole(root / "checkpoints", weights, run, origin, progress)
        if run.train.dpo is not None and run.train.dpo.reference is not None:
            still = reference_run(run)
            write_whole(root / REFERENCE, WithAdapters(directory, still), still, origin, progress)
        with naming(root / "config.yaml"):
            replace_file(root / "config.yaml", dump_run(run), OWN_MODE)
        copy_tokenizer(directory.path, root / TOKENIZER)
        return replace(prepared, notes=(*prepared.notes, *directory.notes))
    finally:
        directory.close()
