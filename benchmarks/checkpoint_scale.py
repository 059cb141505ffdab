"""The metadata work of resuming on thousands of simulated ranks: what one host does before it reads numbers.

    python -m benchmarks.checkpoint_scale --json docs/measured/checkpoint_scale.json

A checkpoint of DeepSeek-V3 is made for 1,024 to 16,384 ranks, pp 16 x ep 64, with the boxes that the sharding code
gives each rank: manifest, index and directories are whole, data files have the right lengths and headers and are sparse
otherwise. Tables are written for the ranks that are looked at; the others' files have a length, and are never opened.
Then, in one process, the code that loads runs as rank 0 and as the eight ranks of a host, one after the other, without
the broadcast and without reading and hashing numbers: calls are counted, and processor time is taken.

    first host      rank 0 reads and checks the manifest, the names and the pages; then as any host
    other host      eight ranks in the middle: each unpacks what was broadcast, looks at the sizes of its share, checks
                    a table and a header against the index, and finds and opens the files of its boxes
    resharded       the same host, which loads under ep 32: other boxes than were written
    save            what rank 0 does once more than the others: the index, from what the ranks sent

A file system that is not local makes each call slower, not more of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moefold.blueprint.parameters import ParameterSpec, buffers, parameters
from moefold.blueprint.sharding import data_sharded_box
from moefold.blueprint.stage_modules import parts_of
from moefold.blueprint.stages import stages_of
from moefold.checkpoint.chunk_index import received_rows, sent_rows, write_index
from moefold.checkpoint.files import FileRecord
from moefold.checkpoint.load import head_for_all, head_from
from moefold.checkpoint.manifest import (
    MANIFEST,
    RankFiles,
    TensorEntry,
    data_name,
    ranks_directory,
    table_name,
    write_manifest,
    write_table,
)
from moefold.checkpoint.shard_file import shard_header, shard_offsets, shard_order
from moefold.checkpoint.step_dirs import check_sizes, final_path
from moefold.checkpoint.tensor_spec import Box, ChunkSpec, volume, whole
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.recipes.catalog import RECIPES
from moefold.topology.folded_layout import GROUPS, FoldedLayout, fold

WORLDS = (1024, 2048, 4096, 8192, 16384)
RANKS_PER_HOST = 8
STEP = 1000
_MOMENTS = ("exp_avg", "exp_avg_sq")
_RNG_BYTES = 5056


def large_run() -> RunConfig:
    return replace(RECIPES["deepseek_v3"](), parallel=ParallelConfig(pp=16, ep=64))


class Simulation:
    """What each rank of a run would write and need; nothing is allocated."""

    def __init__(self, run: RunConfig, world: int) -> None:
        self.run, self.layout = run, fold(run.parallel, world)
        stages, model = stages_of(run.model, run.parallel), run.model
        held = [parts_of((stage for stage in stages if stage.index == rank), model) for rank in range(run.parallel.pp)]
        everything = parameters(model)
        self._parameters = [[spec for spec in everything if parts.holds(spec.name)] for parts in held]
        self._buffers = [[spec for spec in buffers(model) if parts.holds(spec.name)] for parts in held]

    def tensors(self) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        for spec in parameters(self.run.model):
            found |= {f"{kind}/{spec.name}": TensorEntry("F32", spec.shape) for kind in ("parameter", *_MOMENTS)}
            found[f"step/{spec.name}"] = TensorEntry("F32", ())
        return found | {f"buffer/{spec.name}": TensorEntry("F32", spec.shape) for spec in buffers(self.run.model)}

    def boxes(self, rank: int) -> Iterator[tuple[ParameterSpec, Box]]:
        # Layers of a stage are cut alike.
        alike: dict[tuple[str, tuple[int, ...]], Box] = {}
        for spec in self._parameters[self.layout.coordinate(rank, "pp")]:
            key = (spec.name.split(".", 2)[-1], spec.shape)
            if key not in alike:
                alike[key] = data_sharded_box(spec, self.layout, rank)
            yield spec, alike[key]

    def written(self, rank: int) -> list[ChunkSpec]:
        """A rank's chunks, in the order of its file; without tp, each box is held once."""
        chunks = [ChunkSpec(f"rng/{rank}", torch.uint8, (_RNG_BYTES,), whole((_RNG_BYTES,)))]
        for spec, box in self.boxes(rank):
            if volume(box):
                chunks += [
                    ChunkSpec(f"{kind}/{spec.name}", torch.float32, spec.shape, box)
                    for kind in ("parameter", *_MOMENTS)
                ]
                if not any(part.start for part in box):
                    chunks.append(ChunkSpec(f"step/{spec.name}", torch.float32, (), ()))
        if self.layout.index("stage", rank) == 0:
            for spec in self._buffers[self.layout.coordinate(rank, "pp")]:
                chunks.append(ChunkSpec(f"buffer/{spec.name}", torch.float32, spec.shape, whole(spec.shape)))
        return shard_order(chunks)

    def needed(self, rank: int) -> Iterator[tuple[str, Box]]:
        for spec, box in self.boxes(rank):
            yield from ((f"{kind}/{spec.name}", box) for kind in ("parameter", *_MOMENTS))
            yield f"step/{spec.name}", ()
        for spec in self._buffers[self.layout.coordinate(rank, "pp")]:
            yield f"buffer/{spec.name}", whole(spec.shape)


def hosts_of(world: int) -> dict[str, range]:
    middle = world // 2
    return {"first host": range(RANKS_PER_HOST), "other host": range(middle, middle + RANKS_PER_HOST)}


def write_simulated(root: Path, run: RunConfig, world: int) -> tuple[Path, dict[str, Any]]:
    """A committed checkpoint, and the cost of what rank 0 alone does at a save."""
    simulation, path = Simulation(run, world), final_path(root, STEP)
    looked_at = {rank for host in hosts_of(world).values() for rank in host}
    records, sent = [], []
    for rank in range(world):
        (path / ranks_directory(rank)).mkdir(parents=True, exist_ok=True)
        chunks = simulation.written(rank)
        records.append(_rank_files(path, rank, chunks, whole_table=rank in looked_at))
        sent.append(sent_rows(chunks))
    tensors = simulation.tensors()
    # A save of the real thing has the ranks' rows from a collective.
    started = time.process_time()
    index = write_index(path, tensors, [received_rows(rows) for rows in sent])
    seconds = time.process_time() - started
    fields: dict[str, object] = {"run": "", "incarnation": 1, "step": STEP, "world": world, "layout": {}, "config": ""}
    fields |= {"code": "", "state": {}, "index": asdict(index), "files": [asdict(files) for files in records]}
    started = time.process_time()
    write_manifest(path / MANIFEST, fields | {"tensors": {name: asdict(entry) for name, entry in tensors.items()}})
    save = {
        "index_cpu_s": round(seconds, 3),
        "manifest_cpu_s": round(time.process_time() - started, 3),
        "index_bytes": index.rows.bytes + index.pages.bytes,
        "chunks": sum(len(received_rows(rows)) for rows in sent[:1]) * world,
        "sent_bytes_per_rank": max(map(len, sent)),
    }
    return path, save


def _rank_files(path: Path, rank: int, chunks: Sequence[ChunkSpec], whole_table: bool) -> RankFiles:
    size = shard_offsets(chunks)[-1]
    with (path / data_name(rank)).open("wb") as file:
        if whole_table:
            file.write(shard_header(chunks))
        file.truncate(size)
    table = path / table_name(rank)
    if whole_table:
        record = write_table(table, STEP, rank, chunks)
    else:
        table.touch()
        os.truncate(table, 1)
        record = FileRecord(1, "0" * 64)
    return RankFiles(FileRecord(size, "0" * 64), record)


@contextmanager
def counted() -> Iterator[dict[str, Any]]:
    """Calls that ask the file system, bytes read by them, and processor time, in the block."""
    counts: dict[str, Any] = {"stats": 0, "opens": 0, "listings": 0}
    originals = {name: getattr(os, name) for name in ("stat", "lstat", "open", "listdir", "scandir")}
    kinds = {"stat": "stats", "lstat": "stats", "open": "opens", "listdir": "listings", "scandir": "listings"}

    def count(name: str) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:
            counts[kinds[name]] += 1
            return originals[name](*args, **words)

        return call

    read = _bytes_read()
    started = time.process_time()
    for name in originals:
        setattr(os, name, count(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(os, name, original)
        counts["cpu_s"] = round(time.process_time() - started, 3)
        counts["bytes_read"] = counts.get("bytes_read", 0) + _bytes_read() - read


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def load_as_rank(path: Path, head: bytes, loading: Simulation, rank: int) -> tuple[int, int]:
    """As `load_into`, without numbers and without peers; returns how many files it opens, and bytes of the index."""
    checkpoint = head_from(path, head)
    world = loading.layout.world
    # `needed_tensors` compares all names with the live model's.
    offered = {name: checkpoint.manifest.spec(name) for name in checkpoint.names()}
    assert loading.tensors().keys() == offered.keys()
    share = range(rank, checkpoint.manifest.world, world)
    check_sizes(path, checkpoint.manifest, share)
    for each in share:
        checkpoint.check_table(each)
    checkpoint.index.check_pages(range(rank, len(checkpoint.index.pages), world))
    files = {chunk.rank for name, box in loading.needed(rank) for chunk in checkpoint.locate(name, box)}
    for each in files:
        checkpoint.shard(each)
    return len(files), sum(rows.nbytes for rows in checkpoint.index.checked.values())


def measure_host(path: Path, loading: Simulation, ranks: range, head: bytes | None, tries: int) -> dict[str, Any]:
    """Without ``head``, the first rank reads it. The least of several times: others use the cores too."""
    found = []
    for _ in range(tries):
        # A rank that starts has no heap of a simulation to be searched for garbage.
        gc.collect()
        gc.freeze()
        with counted() as counts:
            shared = head_for_all(path) if head is None else head
            files, index_bytes = zip(*(load_as_rank(path, shared, loading, rank) for rank in ranks), strict=True)
            counts["bytes_read"] = sum(index_bytes)
        gc.unfreeze()
        found.append(counts | {"data_files_per_rank": max(files), "broadcast_bytes": len(shared)})
    return min(found, key=lambda each: float(each["cpu_s"]))


def measure(root: Path, run: RunConfig, world: int, tries: int = 3) -> dict[str, Any]:
    shutil.rmtree(root, ignore_errors=True)
    path, save = write_simulated(root, run, world)
    same = Simulation(run, world)
    other = Simulation(replace(run, parallel=replace(run.parallel, ep=run.parallel.ep // 2)), world)
    hosts, head = hosts_of(world), head_for_all(path)
    found: dict[str, Any] = {"world": world, "tensors": len(same.tensors()), "save": save}
    found["first host"] = measure_host(path, same, hosts["first host"], None, tries)
    found["other host"] = measure_host(path, same, hosts["other host"], head, tries)
    found["resharded"] = measure_host(path, other, hosts["other host"], head, tries)
    return found | {"groups_per_rank": groups_per_rank(same.layout, world // 2)}


def groups_per_rank(layout: FoldedLayout, rank: int) -> int:
    """Process groups that a rank makes: distinct lists of more than one rank and less than all, and its channels."""
    lists = {layout.ranks(name, rank) for name in GROUPS}
    return sum(1 < len(ranks) < layout.world for ranks in lists) + 2 * min(2, layout.size("pp") - 1)


def exponent(worlds: Sequence[int], values: Sequence[float]) -> float:
    """Of the power of the world that the values follow, by least squares."""
    return round(float(np.polyfit(np.log(worlds), np.log(np.maximum(values, 1e-9)), 1)[0]), 2)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    worlds = [row["world"] for row in rows]
    hosts = ("first host", "other host", "resharded")
    n_log_n = exponent(worlds, [world * math.log(world) for world in worlds])
    return {
        "exponents": {host: exponent(worlds, [row[host]["cpu_s"] for row in rows]) for host in hosts}
        | {"save": exponent(worlds, [row["save"]["index_cpu_s"] for row in rows]), "n log n": n_log_n}
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_scale", description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS))
    parser.add_argument("--directory", type=Path, help="where the simulated checkpoints are made")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        for world in args.worlds:
            rows.append(measure(Path(root) / "checkpoints", large_run(), world))
            print(json.dumps(rows[-1]), flush=True)
    found = {"model": "deepseek_v3", "layout": "pp16 ep64", "ranks_per_host": RANKS_PER_HOST, "rows": rows}
    found |= summary(rows) if len(rows) > 1 else {}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
