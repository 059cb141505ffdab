"""The stream of weights: bitwise the exported weights over every kind of layout, in the memory of two buckets, and to
other processes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from tests.checkpoint.hf_sources import tensors_in
from tests.hf_models import FAMILY_PROXIES
from tests.marks import slow_except
from tests.published_models import PUBLISHED, model_of, small
from torch import Tensor

from moefold.api.runs import load_run
from moefold.checkpoint.hf.config_maps import family_rules
from moefold.checkpoint.hf.gather_weights import WeightBucket, bucket_plan, hf_weights, weight_buckets
from moefold.checkpoint.hf.hf_config import family_of
from moefold.checkpoint.hf.hf_conversion import Export, export
from moefold.checkpoint.hf.hf_directory import weight_keys
from moefold.checkpoint.hf.name_rules import hf_tensors
from moefold.checkpoint.hf.peft_adapters import write_adapters
from moefold.checkpoint.lora_weights import Merged
from moefold.checkpoint.save import Saver
from moefold.checkpoint.single_process import StoredWeights
from moefold.checkpoint.state_dict import chunks_of, run_record
from moefold.comm.spawn import spawn_ranks
from moefold.config.run import RunConfig
from moefold.dryrun.storage_tracker import StorageTracker, peak_of
from moefold.errors import ConversionError, ExchangeError
from moefold.nn.init import Box
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.prove.compare_rank import _TIMEOUT, CPU
from moefold.prove.proof_inputs import proof_init
from moefold.recipes.catalog import RECIPES
from moefold.rl.weight_transport import GroupChannel, SharedChannel, receive_weights, send_weights

BUCKET = 64 << 10
PP_TP_EP = {"parallel.pp": 2, "parallel.tp": 2, "parallel.ep": 2}
PP_CP_EP = {"parallel.pp": 2, "parallel.cp": 2, "parallel.ep": 2}
LAYOUTS: list[dict[str, object]] = [
    PP_TP_EP,
    PP_CP_EP,
    {"parallel.tp": 2, "parallel.cp": 2},
    {"parallel.pp": 2, "parallel.vpp": 2, "parallel.schedule": "interleaved", "model.tied_embeddings": True},
    {"parallel.pp": 2, "parallel.tp": 2, "parallel.etp": 2, "parallel.sharding": "flat"},
    {"parallel.pp": 2, "parallel.dp_replicate": 2, "parallel.ep": 2},
]


def some_zeros_negative(
    kind: str, seed: int, name: str, shape: tuple[int, ...], box: Box, std: float, into: Tensor
) -> None:
    """Values whose bits a sum of floats would not keep: -0.0 + 0.0 is 0.0."""
    proof_init(kind, seed, name, shape, box, std, into)
    into[into.abs() < 0.1 * std] = -0.0


def local_model_of(run: RunConfig, world: int, rank: int) -> LocalModel:
    return build_local_model(run, groups_of(run, world, rank, _TIMEOUT), CPU, some_zeros_negative)


def stored_alone(run: RunConfig, root: Path) -> StoredWeights:
    """A checkpoint of one process, which reads neither pieces nor buckets."""

    def work(rank: int) -> None:
        local_model = local_model_of(run, 1, rank)
        saver = Saver(root / "saved", local_model.groups["world"], 0, background=False, about=run_record(local_model))
        saver.begin(1, chunks_of(local_model, None), {})
        saver.finish()

    spawn_ranks(work, 1, seconds=120)
    return StoredWeights(root / "saved" / "step_00000001")


def exported(run: RunConfig, root: Path) -> dict[str, Tensor]:
    stored = stored_alone(run, root)
    export(stored, Export(stored.run.model, 1 << 30, torch.float32), root / "exported")
    return tensors_in(root / "exported")


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, PP_TP_EP, PP_CP_EP, LAYOUTS[2], LAYOUTS[4]), ids=str)
def test_every_layout_streams_the_exported_bits_in_two_buckets(layout: dict[str, object], tmp_path: Path) -> None:
    run = load_run("qwen3_30b_a3b_proxy", layout)
    alone = {key: 1 if type(value) is int else value for key, value in layout.items() if key != "parallel.schedule"}
    expected = exported(replace(load_run("qwen3_30b_a3b_proxy", alone), name="alone"), tmp_path)
    assert any((tensor.view(torch.int32) == -(2**31)).any() for tensor in expected.values())

    def work(rank: int) -> dict[str, int]:
        local_model = local_model_of(run, 4, rank)
        seen: dict[str, int] = {}
        with StorageTracker() as tracker:
            for bucket in weight_buckets(local_model, BUCKET):
                assert bucket.bytes.numel() <= BUCKET
                for part, values in bucket.tensors():
                    rows = expected[part.hf_name][part.rows.start : part.rows.stop]
                    # No copies here: only what the stream itself holds is measured.
                    assert torch.equal(values.view(torch.int32), rows.view(torch.int32)), part.hf_name
                    seen[part.hf_name] = seen.get(part.hf_name, 0) + values.shape[0]
        assert seen == {name: tensor.shape[0] for name, tensor in expected.items()}
        own = {number: size for number, size in tracker.events if size >= BUCKET // 4}
        assert len(own) == 2, "the stream allocates its two buffers and nothing of their size beside"
        whole = dict(hf_weights(local_model, bucket_bytes=BUCKET))
        assert whole.keys() == expected.keys() and all(same_bits(whole[name], expected[name]) for name in expected)
        return {"peak": peak_of(tracker.events, {}, ()).total, "all": sum(x.nbytes for x in expected.values())}

    for found in spawn_ranks(work, 4, seconds=300):
        assert found["peak"] <= 2 * BUCKET < found["all"] / 4


ADAPTERS: dict[str, object] = {"model.lora.rank": 4, "optim.trained": "adapters", "precision.compute": "float32"}
ADAPTED: list[tuple[str, dict[str, object]]] = [
    ("qwen3_30b_a3b_proxy", PP_TP_EP),
    ("qwen3_30b_a3b_proxy", PP_CP_EP),
    ("deepseek_v3_proxy", {"parallel.tp": 2, "parallel.etp": 2, "parallel.dp_replicate": 2, "model.num_mtp": 0}),
    ("gpt_oss_20b_proxy", {"parallel.ep": 4, "parallel.sharding": "flat"}),
]


@pytest.mark.parametrize(("recipe", "layout"), slow_except(ADAPTED, ADAPTED[0]), ids=str)
def test_adapters_are_merged_into_the_stream_or_streamed_by_peft_name(
    recipe: str, layout: dict[str, object], tmp_path: Path
) -> None:
    """What `convert to-hf --merge`, `to-hf` of the weights alone and `to-peft` write of a checkpoint of one process."""
    run = load_run(recipe, layout | ADAPTERS)
    alone = {key: value for key, value in layout.items() if key.startswith("model.")}
    stored = stored_alone(replace(load_run(recipe, alone | ADAPTERS), name="alone"), tmp_path)
    merged = Merged(stored, run.model)
    export(merged, Export(merged.model, 1 << 30, torch.float32), tmp_path / "merged")
    write_adapters(stored, run.model, tmp_path / "adapters", torch.float32)
    expected = {name: tensors_in(tmp_path / name) for name in ("merged", "adapters")}
    keys = weight_keys(merged.model)
    expected["base"] = {
        each.hf_name: each.to_hf(stored.read(keys[each.moefold_name], each.box)).float().contiguous()
        for each in hf_tensors(family_rules(family_of(merged.model)), merged.model)
    }
    changed = [name for name in expected["merged"] if not same_bits(expected["merged"][name], expected["base"][name])]
    assert len(changed) > 10

    def work(rank: int) -> dict[str, list[float]]:
        local_model = local_model_of(run, 4, rank)
        apart = {}
        for stream, tensors in expected.items():
            found = dict(hf_weights(local_model, bucket_bytes=BUCKET, stream=stream))
            assert found.keys() == tensors.keys() and all(found[name].shape == tensors[name].shape for name in tensors)
            different = [name for name in tensors if not same_bits(found[name], tensors[name])]
            largest = max((float((found[name] - tensors[name]).abs().max()) for name in different), default=0.0)
            apart[stream] = [len(different), largest]
        return apart

    for apart in spawn_ranks(work, 4, seconds=300):
        assert apart["base"] == apart["adapters"] == [0, 0.0]
        # Sums of B A over a rank's own rows may be rounded in another order.
        assert apart["merged"][1] <= 1e-6, apart


def test_streams_that_do_not_exist_are_refused() -> None:
    model = load_run("qwen3_30b_a3b_proxy").model
    for stream, words in (("adapters", "there are no adapters to stream"), ("peft", "use merged, base, adapters")):
        with pytest.raises(ConversionError, match=words):
            bucket_plan(model, torch.float32, 1 << 30, stream=stream)


@pytest.mark.parametrize("name", [*FAMILY_PROXIES, *PUBLISHED])
def test_every_family_has_a_plan(name: str) -> None:
    """Its HF tensors, each once; and the least of a bucket is never more than a tensor."""
    model = model_of(small(name)) if name in PUBLISHED else RECIPES[name]().model
    model = replace(model, num_mtp=0)
    expected = {each.hf_name: each.hf_shape for each in hf_tensors(family_rules(family_of(model)), model)}
    (bucket,) = bucket_plan(model, torch.float32, 1 << 30)
    assert {part.hf_name: part.shape for part in bucket} == expected and all(part.is_whole for part in bucket)
    largest = max(part.nbytes for part in bucket)
    assert sum(len(parts) for parts in bucket_plan(model, torch.float32, largest + 16)) == len(bucket)


def test_rows_of_a_tensor_that_is_larger_than_a_bucket() -> None:
    model = load_run("gpt_oss_20b_proxy").model
    smallest = bucket_plan(model, torch.float32, 1 << 30)
    assert len(smallest) == 1
    plan = bucket_plan(model, torch.float32, 16 << 10, torch.bfloat16)
    parts = [part for bucket in plan for part in bucket]
    assert any(not part.is_whole for part in parts)
    by_name: dict[str, list[range]] = {}
    for part in parts:
        by_name.setdefault(part.hf_name, []).append(part.rows)
    for part in smallest[0]:
        rows = [row for rows in by_name[part.hf_name] for row in rows]
        assert rows == list(part.rows)
    for bucket in plan:
        ends = [part.offset + part.nbytes for part in bucket]
        assert ends[-1] <= 16 << 10 and all(a <= b.offset for a, b in zip(ends, bucket[1:]))
    with pytest.raises(ConversionError, match=r"bucket_bytes.*64 is less than a row of"):
        bucket_plan(model, torch.float32, 64)


def test_from_one_rank_to_another_group_and_through_shared_memory(tmp_path: Path) -> None:
    """Rank 0 of a pipeline gets the buckets and sends them; on rank 1, a thread stands for the inference engine."""
    run = load_run("qwen3_30b_a3b_proxy", {"parallel.pp": 2})

    def work(rank: int) -> dict[str, str]:
        local_model, between = local_model_of(run, 2, rank), dist.new_group([0, 1])
        whole = {name: checksum(values) for name, values in hf_weights(local_model)}
        for name in ("group", "shared"):
            path = tmp_path / name
            if rank == 0:
                # Made before the other side opens it.
                channel = GroupChannel(between, 0) if name == "group" else SharedChannel(path, 1 << 20, seconds=60)
                dist.barrier()
                assert send_weights(weight_buckets(local_model, 1 << 20, to=0), channel) > 0
                assert name == "group" or path.stat().st_mode & 0o777 == 0o600
            else:
                dist.barrier()
                channel = GroupChannel(between, 0) if name == "group" else SharedChannel(path, seconds=60)
                assert received_beside(channel, lambda: list(weight_buckets(local_model, 1 << 20, to=0))) == whole
        return whole

    first, second = spawn_ranks(work, 2, seconds=200)
    assert len(first) > 20 and first == second


def received_beside(
    channel: GroupChannel | SharedChannel, take_part: Callable[[], list[WeightBucket]]
) -> dict[str, str]:
    """What a thread receives while this rank takes part in the sums, from which it gets nothing itself."""
    found: dict[str, str] = {}

    def receive() -> None:
        found.update({part.name: checksum(part.values) for part in receive_weights(channel)})

    reader = threading.Thread(target=receive)
    reader.start()
    assert take_part() == []
    reader.join()
    return found


def checksum(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class _Recorded:
    """A channel that says what it was told."""

    def __init__(self, header: bytes) -> None:
        self.header = header

    def send(self, header: bytes, payload: Tensor) -> None: ...

    def receive(self) -> tuple[bytes, Tensor]:
        return self.header, torch.zeros(64, dtype=torch.uint8)


@pytest.mark.parametrize(
    "part",
    [
        '"dtype": "F32", "shape": [4, 4], "offset": 16, "first_row": 0, "full_shape": [4, 4]',
        '"dtype": "F32", "shape": [4, 4], "offset": -4, "first_row": 0, "full_shape": [4, 4]',
        '"dtype": "F32", "shape": [4, 4], "offset": 0, "first_row": 1, "full_shape": [4, 4]',
        '"dtype": "object", "shape": [4, 4], "offset": 0, "first_row": 0, "full_shape": [4, 4]',
        '"dtype": "F32", "shape": [true, 4], "offset": 0, "first_row": 0, "full_shape": [4, 4]',
    ],
)
def test_a_part_outside_of_the_bucket_is_refused(part: str) -> None:
    header = ('{"parts": [{"name": "a", ' + part + '}], "bytes": 64}').encode()
    with pytest.raises(ExchangeError):
        list(receive_weights(_Recorded(header)))
