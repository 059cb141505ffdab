"""Console output: one line per interval, for people and for `grep`; and a progress bar on a terminal.

    step=120/300 loss=2.4312 balance.sequence=0.0103 grad_norm=0.812 lr=3.00e-04 tokens/s=12.3K tflops=0.021 ...

Every field is `name=value` without blanks, in a fixed order, so `grep -o ' loss=[^ ]*'` is a loss curve. Loss, speed,
waiting, load and metrics of callbacks are those of the whole interval, grad_norm and lr those of its last step. A
skipped step has a line of its own with the reason, whatever the interval.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from moefold.checks.kernels import CPU_INSTRUCTIONS, experts_in_use
from moefold.nn.float32_matmul import cpu_matmul_here
from moefold.plan.dispatch_choice import dispatcher_in_use
from moefold.train.callback import Callback, Control, Evaluation, RunInfo, StepRecord
from moefold.train.metrics import Meter, device_name, router_stats
from moefold.units import format_bytes, format_count, format_seconds


class ConsoleLines(Callback):
    """Prints to standard output, or to standard error where standard output is for data."""

    def __init__(self, device: str | None = None, *, to_stderr: bool = False) -> None:
        self._to_stderr = to_stderr
        self._device = device
        self._meter: Meter | None = None
        self._every = 1
        self._pending: list[StepRecord] = []

    def on_start(self, info: RunInfo) -> None:
        self._meter = Meter(info, self._device or device_name(info.device))
        self._every = max(info.run.train.log_every, 1)
        resumed = "" if info.resumed_from is None else f" resumed_from={info.resumed_from}"
        size = f"parameters={format_count(info.parameters.total)} active={format_count(info.parameters.active)}"
        chosen = f" dispatcher=adaptive:{dispatcher_in_use(info.run)}" * _is_adaptive(info)
        if info.run.model.moe is not None and info.run.kernels.experts == "auto":
            chosen += f" experts=auto:{experts_in_use(info.run, info.device)}"
        fewer = "" if info.asked is None else f" of={info.asked.world}"
        self._print(
            f"run={info.run.name} world={info.world}{fewer} device={info.device} {size}{chosen} "
            f"directory={info.directory}{resumed}"
        )
        if (words := _multiplied_in(info)) is not None:
            self._print(words)
        flops = format_count(self._meter.flops_per_token)
        self._print(f"flops/token={flops} (3 x forward, causal attention as half, no router) {self._meter.mfu_note}")

    def after_step(self, record: StepRecord, control: Control) -> None:
        assert self._meter is not None, "on_start comes first"
        eta = self._meter.eta(record)
        self._pending.append(record)
        if record.skipped is not None:
            self._print(f"step={record.step}/{record.steps} skipped={_one_word(record.skipped)}")
        if record.step % self._every == 0 or record.step == record.steps:
            self._print(interval_line(self._pending, self._meter, eta))
            self._pending = []

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        fields = {"step": str(evaluation.step), "loss": f"{evaluation.loss:.4f}", **_metrics([evaluation.metrics])}
        self._print("validation " + " ".join(f"{name}={value}" for name, value in fields.items()))

    def on_save(self, step: int, path: Path) -> None:
        self._print(f"saved step={step} path={path}")

    def on_save_failed(self, step: int, reason: str, retries_left: int) -> None:
        self._print(f"save_failed step={step} retries_left={retries_left} reason={_one_word(reason)}")

    def on_roll_back(self, step: int, reason: str) -> None:
        self._pending = []
        self._print(f"roll_back step={step} reason={_one_word(reason)}")

    def on_straggler(self, step: int, rank: int, slow: bool, seconds: Mapping[str, float]) -> None:
        numbers = " ".join(f"{name}={value * 1e3:.1f}ms" for name, value in seconds.items())
        self._print(f"straggler step={step} rank={rank} slow={str(slow).lower()} {numbers}")

    def on_end(self, reason: str) -> None:
        self._print(f"stopped reason={_one_word(reason)}")

    def _print(self, line: str) -> None:
        # Looked up at each call: a progress bar may have replaced the streams.
        print_unless_closed(line, sys.stderr if self._to_stderr else sys.stdout)


def print_unless_closed(line: str, out: TextIO) -> None:
    """Print a line; if the reader has closed the pipe, discard this and all later output.

    Ctrl-C in `moefold train ... | tee log` ends `tee` too, and the run still has a checkpoint to write.
    """
    try:
        print(line, file=out, flush=True)
    except BrokenPipeError:
        # The rest of the buffer is discarded, now and when the interpreter flushes it at exit.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, out.fileno())
        os.close(null)
    except OSError:
        # A full disk under a log: the line is in the stream's buffer, or lost; training goes on.
        return


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
        **_metrics([record.metrics for record in records]),
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


def _metrics(logged: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """The mean of every metric that callbacks added, over those steps that have it."""
    names = dict.fromkeys(name for metrics in logged for name in metrics)
    return {name: f"{np.mean([metrics[name] for metrics in logged if name in metrics]):.4g}" for name in names}


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4f}" if values else "none"


def _one_word(text: str) -> str:
    return "_".join(text.split())


def _multiplied_in(info: RunInfo) -> str | None:
    """Said where matmuls are not computed in the format that the run asks for."""
    if cpu_matmul_here(info.run, info.device) == "compute":
        return None
    compute = info.run.precision.compute
    needed = " nor ".join(sorted(CPU_INSTRUCTIONS[compute]))
    why = "as asked for" if info.run.kernels.cpu_matmul == "float32" else f"this CPU has neither {needed}"
    return f"{compute} matmuls are computed in float32 and rounded: {why} (kernels.cpu_matmul)"


def _is_adaptive(info: RunInfo) -> bool:
    """Whether the dispatcher was chosen by its estimated time."""
    parallel = info.run.parallel
    return info.run.model.moe is not None and parallel.dispatcher == "adaptive" and parallel.ep * parallel.etp > 1


class ProgressBar(Callback):
    """On standard error. Lines printed meanwhile appear above it; output sent to a file still goes there."""

    def __init__(self, console: Console | None = None, device: str | None = None) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),
        )
        self._device = device
        self._meter: Meter | None = None
        self._task: TaskID | None = None

    def on_start(self, info: RunInfo) -> None:
        self._meter = Meter(info, self._device or device_name(info.device))
        done, total = info.resumed_from or 0, info.run.train.steps
        self._task = self._progress.add_task(info.run.name, completed=done, total=total, now="")
        self._progress.start()

    def after_step(self, record: StepRecord, control: Control) -> None:
        assert self._meter is not None and self._task is not None, "on_start comes first"
        left, speed = self._meter.eta(record), self._meter.speed([record])
        now = f"loss {record.loss:.3f}  {format_count(speed.tokens_per_s)} tokens/s  {format_seconds(left)} left"
        self._progress.update(self._task, completed=record.step, now=now)

    def on_end(self, reason: str) -> None:
        self._progress.stop()
