"""What a launcher does once before it forks ranks, so that no rank has to do it, at no start.

A restart takes as long as the work that every rank repeats. Some of it is the same each time and needs no peer:
importing modules, asking which packages are installed, reading the builtin corpus, writing the settings as YAML, the
validators of a manifest, and what torch does when it shards its first parameters. A forked process inherits all of it.

For the last, the run's model is built as one rank of a fake world, on the meta device, where tensors have shapes and no
memory. There is no backward pass in it: torch's autograd does not work in a process whose parent has used it. What was
inferred about sharded tensors is forgotten again: the ranks' meshes are equal to those of the fake world, but their
process groups are not.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

import moefold.train.train_loop  # noqa: F401  (ranks would import it one by one)
from moefold.checkpoint.manifest import build_validators
from moefold.comm.process_groups import forget_shardings
from moefold.config.loading import dump_run
from moefold.config.run import RunConfig
from moefold.data.samples import open_samples
from moefold.errors import MoefoldError
from moefold.parallel.parallelize import build_on_meta, groups_of
from moefold.pipeline.step import make_optimizer
from moefold.train.fault_tolerance.signals import print_stderr
from moefold.train.fault_tolerance.state_hash import multipliers

_CPU = torch.device("cpu")


def warm_up(run: RunConfig, world: int) -> float:
    """Prepare this process to fork ranks of a run on CPUs; returns the seconds that it took."""
    began = time.monotonic()
    build_validators()
    multipliers()
    dump_run(run)
    # The first range of a profile, which every optimizer step is, imports modules.
    with record_function("warm-up"):
        pass
    try:
        open_samples(run.data, run.model.vocab_size, run.seed, "train")
        if run.data.validation is not None:
            open_samples(run.data, run.model.vocab_size, run.seed, "validation")
        rehearse(run, world)
    except MoefoldError:
        # The ranks meet the same problem, and report it with what they know of it.
        pass
    except Exception as error:
        print_stderr(f"ranks start without a rehearsal, which failed: {type(error).__name__}: {error}")
    return time.monotonic() - began


def rehearse(run: RunConfig, world: int) -> None:
    """Build rank 0's model without memory."""
    if dist.is_initialized():
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        make_optimizer(build_on_meta(run, groups_of(run, world, 0, timedelta(seconds=60)), _CPU))
    finally:
        dist.destroy_process_group()
        forget_shardings()
