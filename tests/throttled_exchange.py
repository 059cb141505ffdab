"""What exchanges cost on a slow link between two hosts, and how much of it each overlap hides.

Two network namespaces joined by a link of 375 Mbit/s, ranks spread over both, experts spread over all ranks: half of
every dispatch and combine of two ranks crosses the link. Or a dense model whose heads and hidden dims are spread over
all ranks, so that tokens cross it before and after every sharded matmul; or one whose tokens are spread over all ranks,
so that queries, keys and values cross it before attention and its output after it. Each setting trains the same
microbatches for a few steps.

    exposed    the share of a step in which a rank waits for an exchange and computes nothing
    compute    seconds of a step without those waits, in the setting without overlap
    link       bytes that left a host in a step, counted by the kernel, over the rate of the link
    bound      the longer of the two: no overlap makes a step shorter

    python -m tests.throttled_exchange --json docs/measured/throttled_exchange.json

Needs the right to make network namespaces, and a core per rank that nothing else uses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.two_hosts import move_to, two_hosts

import moefold.comm.p2p
from moefold.comm import collectives as exchange
from moefold.comm.spawn import spawn_ranks
from moefold.config.attention import GQAConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.config.parallel import ContextConfig, ParallelConfig
from moefold.config.precision import KernelsConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch import all_to_all
from moefold.nn.batch import context_shard, whole_batch
from moefold.parallel.parallelize import build_local_model, groups_of
from moefold.pipeline.runtime import run_schedule

TOKENS, DIM, HIDDEN = 512, 512, 768
MBIT_S = 375
# All gather weights once per step, so that exchanges with experts are all that crosses the link inside it.
SETTINGS: dict[str, dict[str, Any]] = {
    "one after the other": {"schedule": "zb_h1"},
    "pairs": {"schedule": "1f1b_overlapped"},
    # Choices are balanced, so buffers without slack hold all rows, and the link carries what it carries above.
    "pairs, bounded": {
        "schedule": "1f1b_overlapped",
        "dispatcher": "all_to_all_bounded",
        "row_bound": 1.0,
        "pair_bound": 1.0,
    },
    "shared expert beside": {"schedule": "zb_h1", "overlap": ("shared_experts",)},
    "2 chunks": {"schedule": "zb_h1", "exchange_chunks": 2},
    "4 chunks": {"schedule": "zb_h1", "exchange_chunks": 4},
    "2 chunks, shared expert beside": {"schedule": "zb_h1", "exchange_chunks": 2, "overlap": ("shared_experts",)},
    "4 chunks, shared expert beside": {"schedule": "zb_h1", "exchange_chunks": 4, "overlap": ("shared_experts",)},
}
PLAIN = "one after the other"
# Of the dense model: tensor parallelism, and Ulysses.
TENSOR_SETTINGS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "2 chunks": {"overlap": ("tensor_parallel",), "tp_chunks": 2},
    "4 chunks": {"overlap": ("tensor_parallel",), "tp_chunks": 4},
}
_HEADS: dict[str, Any] = {"schedule": "zb_h1", "context": ContextConfig(full="all_to_all")}
ULYSSES_SETTINGS: dict[str, dict[str, Any]] = {
    PLAIN: _HEADS,
    "2 chunks": {**_HEADS, "overlap": ("ulysses",), "ulysses_chunks": 2},
    "4 chunks": {**_HEADS, "overlap": ("ulysses",), "ulysses_chunks": 4},
}


def dense_run(parallel: ParallelConfig) -> RunConfig:
    model = ModelConfig(
        vocab_size=256,
        dim=DIM,
        num_layers=2,
        attention=GQAConfig(num_heads=8, num_kv_heads=8, head_dim=64),
        moe=None,
        dense_hidden_dim=4 * HIDDEN,
    )
    return RunConfig(
        seed=1,
        model=model,
        parallel=parallel,
        data=DataConfig(seq_len=TOKENS * parallel.cp, global_batch=1),
    )


def run_config(parallel: dict[str, Any], world: int, microbatches: int, shared: bool) -> RunConfig:
    return RunConfig(
        seed=1,
        model=ModelConfig(
            vocab_size=256,
            dim=DIM,
            num_layers=2,
            attention=GQAConfig(num_heads=8, num_kv_heads=8, head_dim=64),
            moe=MoEConfig(
                num_experts=8,
                top_k=2,
                expert_hidden_dim=HIDDEN,
                shared_hidden_dim=HIDDEN if shared else 0,
                router=RouterConfig(kind="balanced"),
            ),
        ),
        parallel=ParallelConfig(ep=world, **parallel),
        data=DataConfig(seq_len=TOKENS, global_batch=world * microbatches),
        kernels=KernelsConfig(experts="sequential"),
    )


class Exposed:
    """Adds up the time that the main thread spends waiting for exchanges."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **words: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **words)
            finally:
                self.seconds += time.perf_counter() - began

        return timed_call

    def watch(self) -> None:
        """In this process, for good."""
        main = threading.get_ident()

        def only_on_main(call: Callable[..., Any]) -> Callable[..., Any]:
            timed = self.timed(call)
            return lambda *args, **words: (timed if threading.get_ident() == main else call)(*args, **words)

        def wait(_: Any, future: Any, meanwhile: Callable[[], bool]) -> Any:
            while not future.done() and meanwhile():
                pass
            return self.timed(future.result)()

        for name in ("_all_to_all", "_all_gather", "_reduce_scatter"):
            setattr(exchange, name, only_on_main(getattr(exchange, name)))
        all_to_all.all_to_all_counts = only_on_main(exchange.all_to_all_counts)
        moefold.comm.p2p.ThreadCommStream.wait = wait  # type: ignore[method-assign]


def sent_bytes() -> int:
    """That left this host, as its kernel counts them."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (cable,) = (line.partition(":")[2].split() for line in lines if line.strip().startswith("cable:"))
    return int(cable[8])


def measure(run: RunConfig, steps: int, world: int, rank: int) -> dict[str, Any]:
    """Medians over steps, after one that is not counted; and what tells whether values are equal."""
    exposed = Exposed()
    exposed.watch()
    local_model = build_local_model(run, groups_of(run, world, rank, timedelta(seconds=120)), torch.device("cpu"))
    # Ranks of tensor and context parallelism have the same sequences.
    cp, sharing, length = run.parallel.cp, run.parallel.tp * run.parallel.cp, run.data.seq_len
    generator = torch.Generator().manual_seed(rank // sharing)
    count = run.data.global_batch * length
    batches = []
    for _ in range(run.data.global_batch * sharing // world):
        tokens = torch.randint(256, (length + 1,), generator=generator)
        whole = whole_batch(tokens[:-1], tokens[1:], (length,), step_labels=count, step_tokens=count, context_size=cp)
        batches.append(context_shard(whole, rank % cp))
    seconds, waits, sent = [], [], []
    local_model.sharding.start_step()
    for _ in range(steps + 1):
        local_model.model.zero_grad()
        torch.distributed.barrier()
        exposed.seconds, before, began = 0.0, sent_bytes(), time.perf_counter()
        sums = run_schedule(local_model, batches)
        seconds.append(time.perf_counter() - began)
        waits.append(exposed.seconds)
        torch.distributed.barrier()
        sent.append(sent_bytes() - before)
    parameters = local_model.model.named_parameters()
    gradients = [p.grad for name, p in parameters if ".feed_forward." in name and p.grad is not None]
    return {
        "step_s": statistics.median(seconds[1:]),
        "waiting_s": statistics.median(waits[1:]),
        "exposed": statistics.median(wait / step for wait, step in zip(waits[1:], seconds[1:], strict=True)),
        "sent_bytes": statistics.median(sent[1:]),
        "loss": float(sums.loss),
        "grad_norm": sum(float(g.detach().double().square().sum()) for g in gradients) ** 0.5,
    }


def over_the_link(run: RunConfig, steps: int, world: int) -> list[dict[str, Any]]:
    with two_hosts(f"{MBIT_S}mbit"):
        work = partial(measure, run, steps, world)
        return spawn_ranks(work, world, seconds=900, interface=lambda rank: move_to(rank * 2 // world))


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks: the slowest step, and the mean and the largest share that is exposed."""
    return {
        "step_s": round(max(each["step_s"] for each in found), 4),
        "exposed": round(statistics.mean(each["exposed"] for each in found), 4),
        "exposed_most": round(max(each["exposed"] for each in found), 4),
        "compute_s": round(max(each["step_s"] - each["waiting_s"] for each in found), 4),
        "link_s": round(max(each["sent_bytes"] for each in found) * 8 / (MBIT_S * 1e6), 4),
        "loss": statistics.mean(each["loss"] for each in found),
        "grad_norm": statistics.mean(each["grad_norm"] for each in found),
    }


def compare(runs: dict[str, RunConfig], world: int, steps: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, run in runs.items():
        load = os.getloadavg()[0]
        results[name] = summary(over_the_link(run, steps, world)) | {"load_before": round(load, 2)}
        print(name, json.dumps(results[name]), flush=True)
    plain = results[PLAIN]
    bound = max(plain["compute_s"], plain["link_s"])
    for each in results.values():
        each["step_over_bound"] = round(each["step_s"] / bound, 3)
    return {"bound_s": bound, "settings": results}


def page_rows(found: dict[str, Any]) -> list[str]:
    """As docs/pipelines.md has them."""
    rows = []
    for part in ("pairs", "one microbatch", "tensor parallel", "ulysses"):
        count = found["microbatches"] if part == "pairs" else 1
        for name, each in found[part]["settings"].items():
            shown = f"{each['exposed']:.1%}".replace("%", " %"), f"{each['step_over_bound']:.2f}"
            rows.append(f"| {count} | {name} | {each['step_s']:.2f} s | {shown[0]} | {shown[1]} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="on both hosts together (2)")
    parser.add_argument("--microbatches", type=int, default=12, help="of a step with pairs (12)")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each setting (3)")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    args = parser.parse_args()
    torch.set_num_threads(1)
    in_pairs = [name for name in SETTINGS if "pairs" in name]
    many = {name: run_config(SETTINGS[name], args.ranks, args.microbatches, False) for name in (PLAIN, *in_pairs)}
    one = {name: run_config(SETTINGS[name], args.ranks, 1, True) for name in SETTINGS if name not in in_pairs}
    tensor = {name: dense_run(ParallelConfig(tp=args.ranks, **more)) for name, more in TENSOR_SETTINGS.items()}
    ulysses = {name: dense_run(ParallelConfig(cp=args.ranks, **more)) for name, more in ULYSSES_SETTINGS.items()}
    pairs = compare(many, args.ranks, args.steps)
    parts = {"one microbatch": one, "tensor parallel": tensor, "ulysses": ulysses}
    alone = {part: compare(runs, args.ranks, args.steps * 3) for part, runs in parts.items()}
    found = {"ranks": args.ranks, "cores": os.cpu_count(), "mbit_s": MBIT_S, "steps": args.steps}
    found |= {"tokens": TOKENS, "microbatches": args.microbatches, "pairs": pairs, **alone}
    print("\n".join(page_rows(found)))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
