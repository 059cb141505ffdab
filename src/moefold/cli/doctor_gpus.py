"""`moefold doctor --gpus`: what this host's GPUs are, how they are linked, and what is missing or slow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from moefold import __version__
from moefold.bench.link_bench import TRIALS, WARNINGS, LinkReport, measure_links
from moefold.cli.run_argument import launched_ranks
from moefold.comm.launchers import place_of
from moefold.comm.spawn import join_world, this_device
from moefold.errors import ConfigError, Problem
from moefold.ops.gpu_probe import Finding, GpuReport, probe_gpus
from moefold.ops.host_probe import HostInfo, probe_host
from moefold.tables import text_table
from moefold.train.support_bundle import gpu_facts
from moefold.units import format_bytes

# Ranks of other hosts may start later.
_PATIENCE = 300.0


def examine_gpus(seconds: float, as_json: bool, device: str | None = None) -> int:
    """Print the report, on rank 0 if a launcher started this; returns the exit code."""
    if seconds <= 0:
        raise ConfigError(Problem("--seconds", f"is {seconds:g}", "use a positive number"))
    host = probe_host()
    report = probe_gpus(host)
    rank, links = _links(host, report, seconds, device)
    if rank == 0:
        print(_as_json(report, links) if as_json else "\n\n".join(_text(report, links)))
    # A launcher ends all ranks when one fails, also rank 0 while it prints.
    return 1 if report.missing and links is None else 0


def _links(host: HostInfo, report: GpuReport, seconds: float, device: str | None) -> tuple[int, LinkReport | None]:
    """(this rank, the measurement); without a launcher there is nothing to measure."""
    place = place_of(os.environ) if launched_ranks() > 1 else None
    if place is None:
        return 0, None
    if place.local_rank is not None and 1 < len(host.gpus) <= place.local_rank:
        message = f"{place.launcher} started more ranks on this host than the {len(host.gpus)} GPUs that it has"
        raise ConfigError(Problem("local rank", message, "start one rank per GPU"))
    rank, _ = join_world(_PATIENCE, device)
    facts = {
        "torch": host.torch or "none",
        "driver": report.driver or "none",
        "NCCL": report.nccl or "none",
        WARNINGS: "; ".join(finding.what for finding in (*report.missing, *report.warnings)),
    }
    try:
        return rank, measure_links(this_device(device), seconds, facts=facts)
    finally:
        dist.destroy_process_group()


def _as_json(report: GpuReport, links: LinkReport | None) -> str:
    measured = None if links is None else links.to_json()
    return json.dumps({"moefold": __version__, "gpus": gpu_facts(report), "links": measured}, indent=2)


def _text(report: GpuReport, links: LinkReport | None) -> Iterator[str]:
    yield text_table(("what", "on this host"), _facts(report))
    if report.topology is not None:
        yield text_table(("GPU", "NVLink to", "nearest adapter"), _gpu_rows(report))
    for title, findings in (("missing", report.missing), ("slow or off", report.warnings)):
        yield _findings(title, findings)
    if links is None:
        yield (
            "links between ranks: not measured, this is one process; start it on every GPU:\n"
            "    torchrun --master-port 29500 --nproc-per-node 8 -m moefold.cli.main doctor --gpus"
        )
        return
    yield _link_table(links)


def _facts(report: GpuReport) -> list[tuple[str, str]]:
    gpus = [
        f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {format_bytes(gpu.memory)}"
        for gpu in report.gpus
    ]
    distinct = [f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)]
    adapters = [f"{each.name} {each.rate or 'rate unknown'} {each.link_layer}".strip() for each in report.adapters]
    domains = [] if report.topology is None else report.topology.nvlink_domains
    return [
        ("GPUs", "; ".join(distinct) or "none"),
        ("driver", report.driver or "none"),
        ("CUDA of torch", report.cuda or "none"),
        ("NCCL of torch", report.nccl or "none"),
        ("NVLink domains", "; ".join(" ".join(domain) for domain in domains) or "none found"),
        ("RDMA adapters", "; ".join(adapters) or "none found"),
    ]


def _gpu_rows(report: GpuReport) -> list[tuple[str, str, str]]:
    assert report.topology is not None
    rows = []
    for gpu in report.topology.gpus:
        links = report.topology.links[gpu]
        peers = [f"{peer} {way}" for peer, way in links.items() if peer.startswith("GPU") and way.startswith("NV")]
        near = report.topology.nearest_adapter(gpu)
        rows.append((gpu, ", ".join(peers) or "none", "none" if near is None else f"{near[0]} ({near[1]})"))
    return rows


def _findings(title: str, findings: Sequence[Finding]) -> str:
    if not findings:
        return f"{title}: nothing"
    return text_table((title, "why", "what to do"), [(each.what, each.why, each.fix) for each in findings])


def _link_table(links: LinkReport) -> str:
    rows = []
    for row in links.rows:
        rates = ["-" if (rate := row.rates[name]) is None else f"{rate:.3g}" for name in TRIALS]
        rows.append((str(row.rank), row.host, row.device, *rates, row.facts[WARNINGS] or "none"))
    head = ("rank", "host", "device", *TRIALS, "warnings")
    lines = [
        text_table(head, rows),
        f"GB/s of bus bandwidth over {links.backend}, messages of {format_bytes(links.message_bytes)}, "
        f"measured in {links.seconds:.0f} s",
    ]
    if links.backend != "nccl":
        lines.append(f"These are rates of {links.backend} between processes: they say nothing about a GPU's links.")
    lines += [f"slow: {each}" for each in links.slow]
    lines += [f"differs between ranks: {', '.join(links.differing)}"] if links.differing else []
    return "\n".join(lines)
