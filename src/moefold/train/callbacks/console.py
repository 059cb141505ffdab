"""One line per interval that a person can read and `grep` can take apart.

    step=120/300 loss=2.4312 balance.sequence=0.0103 grad_norm=0.812 lr=3.00e-04 tokens/s=12.3K tflops=0.021 ...

Every field is `name=value` without blanks, in a fixed order, so `grep -o ' loss=[^ ]*'` is a loss curve. Loss, speed,
waiting and load are those of the whole interval, norm and rate those of its last step. A skipped step has a line of its
own with the reason, whatever the interval.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from moefold.plan.dispatch_choice import dispatcher_in_use
from moefold.train.callback import Callback, RunInfo, StepRecord
from moefold.train.metrics import Meter, device_name
from moefold.train.router_stats import router_stats
from moefold.units import format_bytes, format_count, format_seconds


class ConsoleLines(Callback):
    """Prints to standard output, or to standard error if that is wanted for something else."""

    def __init__(self, device: str | None = None, *, to_stderr: bool = False) -> None:
        self._to_stderr = to_stderr
        self._device = device
        self._meter: Meter | None = None
        self._every = 1
        self._pending: list[StepRecord] = []

    def on_start(self, info: RunInfo) -> None:
        self._meter = Meter(info, self._device or device_name())
        self._every = max(info.run.train.log_every, 1)
        went_on = "" if info.resumed_from is None else f" resumed_from={info.resumed_from}"
        size = f"parameters={format_count(info.parameters.total)} active={format_count(info.parameters.active)}"
        chosen = f" dispatcher=adaptive:{dispatcher_in_use(info.run)}" * _is_adaptive(info)
        self._say(f"run={info.run.name} world={info.world} {size}{chosen} directory={info.directory}{went_on}")
        flops = format_count(self._meter.flops_per_token)
        self._say(f"flops/token={flops} (3 x forward, causal attention as half, no router) {self._meter.mfu_note}")

    def on_step(self, record: StepRecord) -> None:
        assert self._meter is not None, "on_start comes first"
        eta = self._meter.eta(record)
        self._pending.append(record)
        if record.skipped is not None:
            self._say(f"step={record.step}/{record.steps} skipped={_one_word(record.skipped)}")
        if record.step % self._every == 0 or record.step == record.steps:
            self._say(interval_line(self._pending, self._meter, eta))
            self._pending = []

    def on_validation(self, step: int, loss: float) -> None:
        self._say(f"validation step={step} loss={loss:.4f}")

    def on_save(self, step: int, path: Path) -> None:
        self._say(f"saved step={step} path={path}")

    def on_stop(self, reason: str) -> None:
        self._say(f"stopped reason={_one_word(reason)}")

    def _say(self, line: str) -> None:
        # Looked up now: a progress bar may have put itself in front.
        print_unless_closed(line, sys.stderr if self._to_stderr else sys.stdout)


def print_unless_closed(line: str, out: TextIO) -> None:
    """Print a line; if nobody reads any more, go on in silence.

    Ctrl-C in `moefold train ... | tee log` ends `tee` too, and the run still has a checkpoint to write.
    """
    try:
        print(line, file=out, flush=True)
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, now and when the interpreter flushes it at the end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)


def interval_line(records: Sequence[StepRecord], meter: Meter, eta: float) -> str:
    last, speed = records[-1], meter.speed(records)
    taken = [record for record in records if record.skipped is None]
    fields = {
        "step": f"{last.step}/{last.steps}",
        "loss": _mean([record.loss for record in taken]),
        **{f"balance.{name}": _mean([record.balance.get(name, math.nan) for record in taken]) for name in last.balance},
        "grad_norm": f"{last.grad_norm:.3g}",
        "lr": f"{last.lr:.2e}",
        "tokens/s": format_count(speed.tokens_per_s),
        "tflops": f"{speed.tflops:.3g}",
        "mfu": "unknown" if speed.mfu is None else f"{speed.mfu:.1%}",
        "memory": format_bytes(last.memory_bytes).replace(" ", ""),
        "ms": f"{speed.step_seconds * 1e3:.1f}",
        "data": f"{speed.data_wait:.1%}",
        **_routing(records),
        "skipped": str(len(records) - len(taken)) if len(taken) < len(records) else "",
        "eta": format_seconds(eta).replace(" ", ""),
    }
    return " ".join(f"{name}={value}" for name, value in fields.items() if value)


def _routing(records: Sequence[StepRecord]) -> dict[str, str]:
    """`load` is that of the busiest expert over the mean, in the worst layer."""
    counted = [np.asarray(record.counts, dtype=np.int64) for record in records if record.counts]
    dropped = sum(record.dropped for record in records)
    shown = {"dropped": format_count(dropped)} if dropped else {}
    if not counted:
        return shown
    stats = router_stats(np.sum(counted, axis=0))
    return {"load": f"{stats.max_load:.2f}", **({"dead": str(stats.dead)} if stats.dead else {}), **shown}


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4f}" if values else "none"


def _one_word(text: str) -> str:
    return "_".join(text.split())


def _is_adaptive(info: RunInfo) -> bool:
    """Whether tokens travel in a way that was chosen for the run."""
    parallel = info.run.parallel
    return info.run.model.moe is not None and parallel.dispatcher == "adaptive" and parallel.ep * parallel.etp > 1
