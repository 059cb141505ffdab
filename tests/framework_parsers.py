"""Commands of plans, given to the parsers of the frameworks that they are for.

    python -m tests.framework_parsers record      names of their options, into tests/brain/framework_options.json
    python -m tests.framework_parsers commands    40 questions; each answer's command is parsed and validated

Needs the source of Megatron-LM (`pretrain_gpt.py` is in no package) and torchtitan with tyro on PYTHONPATH, and no GPU:
kernels that are not installed are stood in for, and the GPU is said to be the plan's. Where Megatron accepts a command,
its own count of floating point operations of a step is compared with ours, which tells whether it has understood the
same model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.machinery
import io
import json
import os
import shlex
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from tests.framework_validators import questions

from moefold.blueprint.flops import training_flops
from moefold.errors import MoefoldError
from moefold.hardware.cluster import Cluster
from moefold.plan.framework_commands import framework_command
from moefold.plan.search.proposal import propose
from moefold.plan.workload import Workload

OPTIONS = Path(__file__).parent / "brain" / "framework_options.json"
# Values of what a run leaves open.
FILLED_IN = {"$LR": "1e-4", "$STEPS": "10", "$HEAD": "localhost", "$NODE_RANK": "0"}
# Fused operations of Transformer Engine that Megatron looks for; they are never called here.
FUSED = {
    "megatron.core.models.common.embeddings.rope_utils": (
        "fused_apply_rotary_pos_emb",
        "fused_apply_rotary_pos_emb_thd",
    ),
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_permute_and_pad_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ),
}
TITAN_MODULES = ("deepseek_v3", "qwen3", "gpt_oss")


def imported(name: str) -> Any:
    """A module of a framework, with whatever is not installed stood in for."""
    # Written for Python 3.12.
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    for _ in range(40):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] in ("megatron", "torchtitan", "tyro"):
                raise
            spec = importlib.machinery.ModuleSpec(error.name, None)
            sys.modules[error.name] = MagicMock(__spec__=spec, __version__="3.4.0", __path__=[])
    raise ImportError(name)


# ---- Megatron-LM ----


def megatron_options() -> list[str]:
    parser = imported("argparse").ArgumentParser(allow_abbrev=False)
    imported("megatron.training.arguments").add_megatron_arguments(parser)
    return sorted(option for action in parser._actions for option in action.option_strings)


@contextlib.contextmanager
def on_gpu(cluster: Cluster) -> Iterator[None]:
    """Megatron asks which GPU it runs on, and which Transformer Engine is installed."""
    architecture = 9 if cluster.gpu.architecture == "sm90" else 10
    properties = MagicMock(major=architecture, minor=0, total_memory=80 << 30, multi_processor_count=132)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda *_: properties))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda *_: (architecture, 0)))
        for module in ("megatron.training.arguments", "megatron.core.transformer.transformer_config"):
            stack.enter_context(patch.object(imported(module), "is_te_min_version", lambda *_, **__: True))
        for name, fused in FUSED.items():
            for each in fused:
                stack.enter_context(patch.object(imported(name), each, object(), create=True))
        yield


def megatron_operations(workload: Workload, words: tuple[str, ...]) -> float:
    """Floating point operations of a step as Megatron counts them, over ours; raises what Megatron raises."""
    arguments = imported("megatron.training.arguments")
    program = words.index("pretrain_gpt.py")
    environment = dict(word.split("=", 1) for word in words[:program] if "=" in word and not word.startswith("-"))
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= {"WORLD_SIZE": str(workload.cluster.num_gpus), "RANK": "0", **environment}
    sys.argv = ["pretrain_gpt.py", *argv_of(words[program + 1 :])]
    with on_gpu(workload.cluster), contextlib.redirect_stdout(io.StringIO()):
        args = arguments.parse_args()
        arguments.validate_args(args)
        arguments.core_transformer_config_from_args(args)
        args.padded_vocab_size = workload.run.model.vocab_size
        count = imported("megatron.training.training").num_floating_point_operations
        theirs = count(args, args.global_batch_size)
    data = workload.run.data
    return float(theirs / (training_flops(workload.model, data.seq_len) * data.seq_len * data.global_batch))


def argv_of(words: tuple[str, ...]) -> list[str]:
    line = " ".join(words)
    for name, value in FILLED_IN.items():
        line = line.replace(name, value)
    return shlex.split(line)


# ---- torchtitan ----


def titan_options() -> list[str]:
    trainer = imported("torchtitan.config.configs")
    sections = {
        "parallelism": trainer.ParallelismConfig,
        "training": trainer.TrainingConfig,
        "compile": trainer.CompileConfig,
    }
    fields = (f"--{name}.{each.name}" for name, kind in sections.items() for each in dataclasses.fields(kind))
    return sorted(field.replace("_", "-") for field in fields)


def titan_config(workload: Workload, words: tuple[str, ...]) -> Any:
    """As torchtitan's own manager reads the command; its mesh is built for the plan's number of GPUs."""
    for module in TITAN_MODULES:
        imported(f"torchtitan.models.{module}.config_registry")
    argv = argv_of(words[words.index("-m torchtitan.train") + 1 :])
    config = imported("torchtitan.config.manager").ConfigManager().parse_args(argv)
    imported("torchtitan.distributed.parallel_dims").ParallelDims.from_config(
        config.parallelism, workload.cluster.num_gpus
    )
    return config


# ---- all questions ----


def verdict(workload: Workload) -> tuple[bool, str]:
    """Whether the framework accepts the command, and what there is to say of it."""
    command = framework_command(workload)
    if command is None:
        return True, "no configuration of this model"
    told = f"without {', '.join(command.left_out)}" if command.left_out else "whole"
    try:
        if workload.framework.name == "fsdp2":
            titan_config(workload, command.words)
            return True, f"accepted, {told}"
        return True, f"accepted, {told}; {megatron_operations(workload, command.words):.6f} of our operations"
    except (SystemExit, Exception) as error:
        return False, f"refused: {' '.join(str(error).split())[:300] or type(error).__name__}"


def commands() -> int:
    refused, number = 0, 0
    for question in questions():
        where = f"{question.framework} {question.name} {question.cluster.gpu.name} x{question.cluster.num_gpus}"
        try:
            chosen = propose(question).chosen
        except MoefoldError as error:
            print(f"{where}: no answer: {str(error)[:80]}", flush=True)
            continue
        accepted, words = verdict(chosen.workload)
        number += 1
        refused += not accepted
        print(f"{where}: {words}", flush=True)
    print(f"{number} answers of {len(questions())} questions, {refused} commands refused")
    return 1 if refused else 0


def record() -> int:
    release = imported("megatron.core").__version__
    known = {f"Megatron-LM {release}": megatron_options(), "torchtitan 0.3.0": titan_options()}
    OPTIONS.write_text(json.dumps(known, indent=0) + "\n", "utf-8")
    print({name: len(options) for name, options in known.items()})
    return 0


if __name__ == "__main__":
    verbs = {"record": record, "commands": commands}
    if len(sys.argv) != 2 or sys.argv[1] not in verbs:
        raise SystemExit(__doc__)
    sys.exit(verbs[sys.argv[1]]())
