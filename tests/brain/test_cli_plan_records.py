"""`moefold plan --records`: every record is answered under its own id, or named with the reason why not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.blueprint.model_shape import shape_of
from moefold.checks.run_all import problems
from moefold.cli.main import main
from moefold.plan.published.points import nearest_record, record_words
from moefold.plan.published.records import (
    FLAGS_IGNORED,
    FLAGS_READ,
    VALUES_IGNORED,
    unread_flags,
    workload_of_record,
)
from moefold.recipes.catalog import recipe

SRC = Path(__file__).parents[2] / "src"
MODEL = {
    "moe": True,
    "layers": 4,
    "dense_first_layers": 1,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 4,
    "head_dim": 64,
    "attn": "gqa",
    "ffn": 4096,
    "moe_ffn": 512,
    "experts": 16,
    "topk": 2,
    "vocab": 32000,
}
RECORD = {
    "id": "a",
    "model": MODEL,
    "hardware": {"gpu": "H100", "num_gpus": 64},
    "precision": "bf16",
    "seq_len": 4096,
    "gbs": 512,
    "mbs": 1,
    "parallel": {"tp": 1, "pp": 2, "cp": 1, "ep": 8, "etp": 1, "vpp": 1},
    "flags": {"recompute": ["moe_act"]},
}
ASK_AND_LOOK = """
import sys
from moefold.cli.main import main
code = main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""


def written(path: Path, *records: object) -> Path:
    path.write_text("\n".join(text if isinstance(text := record, str) else json.dumps(record) for record in records))
    return path


def test_the_nearest_published_run_is_of_the_model_before_the_gpu() -> None:
    qwen = {"name": "Qwen3-30B-A3B", "moe": True, "params_total": 30_532_122_624, "params_active": 3_352_000_000}
    other = {"name": "another", "moe": True, "params_total": 57_000_000_000, "params_active": 14_000_000_000}

    def record(
        id: str, model: dict[str, object], gpu: str, num_gpus: int, precision: str = "bf16"
    ) -> dict[str, object]:
        use, source = {"time": True}, {"name": "Somebody docs/table.md"}
        return RECORD | {
            "id": id,
            "model": model,
            "hardware": {"gpu": gpu, "num_gpus": num_gpus},
            "precision": precision,
            "use": use,
            "source": source,
            "date": "2026-01",
        }

    run = recipe("qwen3_30b_a3b")
    records = [record("model", qwen, "GB200", 64), record("gpu", other, "H100", 64)]
    assert nearest_record(run, "H100", 64, records) == records[0]
    records += [record("both", qwen, "H100", 128), record("format", qwen, "H100", 128, "mxfp8")]
    near = nearest_record(run, "H100", 64, records)
    assert near is not None and near["id"] == "both"
    assert record_words(near) == (
        "Qwen3-30B-A3B (30.5B parameters) on 128 H100, bf16, 4096 tokens, pp2 ep8",
        "Somebody, 2026-01",
    )
    # What nobody timed, or of unknown size, is no neighbour.
    assert (
        nearest_record(
            run,
            "H100",
            64,
            [RECORD, RECORD | {"use": {"time": True}}, record("dense", qwen | {"moe": False}, "H100", 64)],
        )
        is None
    )


def test_every_record_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = {key: value for key, value in RECORD.items() if key != "seq_len"} | {"id": "b"}
    strange = RECORD | {"id": "c", "hardware": {"gpu": "H1000", "num_gpus": 64}}
    records = written(tmp_path / "in.jsonl", RECORD, "", broken, strange, "{", RECORD | {"id": "d"}, "[1]")
    out = tmp_path / "out.jsonl"
    assert main(["plan", "--records", str(records), "--predictions", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["a", "d"]
    assert set(lines[0]) == {"id", "step_time_s", "memory_gib", "fits", "interval"}
    low, high = lines[0]["interval"]
    assert 0 < low <= lines[0]["step_time_s"] <= high and lines[0]["memory_gib"] > 0 and lines[0]["fits"] is True
    said = capsys.readouterr()
    assert "2 of 6 records predicted (2 fit), 4 not" in said.out
    for words in (
        "not predicted: b: does not say seq_len\n",
        "not predicted: c: no gpu named 'H1000'",
        "line 5: not JSON",
        "line 7",
    ):
        assert words in said.err


def test_a_record_is_a_run_and_only_what_a_run_cannot_say_is_beside_it() -> None:
    workload = workload_of_record(RECORD)
    run, moe = workload.run, workload.run.model.moe
    assert workload.shape is None and workload.model == shape_of(run.model)
    assert moe is not None and (moe.num_experts, run.model.num_dense_layers, run.parallel.sharding) == (16, 1, "zero1")
    assert (workload.dp, workload.edp, workload.microbatches) == (32, 4, 16)
    assert (workload.weight_bytes, workload.gradient_bytes, workload.master_bytes, workload.moments_bytes) == (
        2,
        4,
        4,
        8,
    )
    assert {problem.path for problem in problems(run, 64)} >= {"parallel.sharding", "precision.master"}
    # A recurrence, attention, experts and a dense layer, each a layer of its own: no configuration says that.
    mixed = workload_of_record(RECORD | {"model": MODEL | {"hybrid": "M*E-"}})
    assert mixed.shape is not None and mixed.model is mixed.shape and len(mixed.model.layers) == 4


def test_ranks_that_a_layout_leaves_over_count_in_no_grid() -> None:
    """World and cluster may differ: 67 GPUs, of which tp * cp * pp * dp = 64 work."""
    odd = RECORD | {"hardware": {"gpu": "H100", "num_gpus": 67}, "parallel": RECORD["parallel"] | {"tp": 4}}  # type: ignore[operator]
    workload = workload_of_record(odd)
    assert workload.cluster.num_gpus == 67 and workload.dp == 8 and workload.edp == 4


def test_without_a_batch_there_is_memory_but_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = {key: value for key, value in RECORD.items() if key != "gbs"}
    assert main(["plan", "--records", str(written(tmp_path / "in.jsonl", unknown))]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"id", "memory_gib", "fits"}


def test_answers_go_to_stdout_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = written(tmp_path / "in.jsonl", RECORD)
    assert main(["plan", "--records", str(records)]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["a"]
    assert main(["plan", "--records", str(records), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 1


def test_nothing_predicted_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--records", str(written(tmp_path / "in.jsonl", "{"))]) == 1
    assert main(["plan", "--records", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_records_are_predicted_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASK_AND_LOOK, "plan", "--records", str(written(tmp_path / "in.jsonl", RECORD))]
    done = subprocess.run(command, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False", "torch was imported"


@pytest.mark.skipif("MOEFOLD_PUBLISHED" not in os.environ, reason="the published collection is not here")
def test_published_records_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("published.jsonl", "feasibility.jsonl"):
        path = Path(os.environ["MOEFOLD_PUBLISHED"]) / name
        assert main(["plan", "--records", str(path), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        complete = {record["id"] for record in map(json.loads, path.open()) if record.get("use", {}).get("time")}
        assert complete <= {line["id"] for line in answer["predictions"]}


# Of the collection that the planner is fitted to.
NAMES = """activation_cpu_offload_layers activation_offload async_tp attention_backend attention_parallel attn compile
competitor_prediction cpu_offload_layers cross_entropy_fusion cuda_graph cuda_graph_impl cuda_graph_scope
cutedsl_fused_grouped_mlp delay_wgrad dispatcher distributed_optimizer ep_overlap exp_avg_dtype
expert_parallel experts fine_grained_offload fp8_attention fp8_dispatch fp8_dot_product_attention
fp8_param_gather fsdp grad_reduce_in_fp32 local_batch megatron_fsdp mock_data num_layers offload_modules
optimizer optimizer_offload optimizer_state_offload optimizer_states overlap_grad_reduce overlap_param_gather
p2p_overlap paged_stash peft pp_layout pp_schedule precision_args recompute recompute_granularity
recompute_num_layers routing sequence_parallel shared_expert_overlap system task tp_comm_overlap"""
FLAGS = NAMES.split()


def test_every_flag_of_a_record_is_read_or_ignored_for_a_reason_or_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(unread_flags(RECORD | {"flags": dict.fromkeys(FLAGS)})) == []
    assert not FLAGS_READ & FLAGS_IGNORED.keys()
    assert all(len(reason) > 20 for reason in (*FLAGS_IGNORED.values(), *VALUES_IGNORED.values()))
    flags = {
        "recompute": ["moe_act", "moe_dispatch", "not stated in this release"],
        "dispatcher": "deepep-uccl",
        "offload_modules": "[expert_fc1 other_fc]",
        "cuda_graph_scope": ["attn", "lm_head"],
        "fused_everything": True,
    }
    unread = ["fused_everything", "recompute moe_dispatch", "offload_modules other_fc", "cuda_graph_scope lm_head"]
    assert list(unread_flags(RECORD | {"flags": flags})) == unread
    assert list(unread_flags(RECORD | {"flags": {"dispatcher": "of our own"}})) == ["dispatcher of our own"]
    records = written(tmp_path / "records.jsonl", RECORD | {"flags": flags}, RECORD | {"flags": flags}, "no JSON")
    assert main(["plan", "--records", str(records), "--predictions", str(tmp_path / "out.jsonl")]) == 0
    listed = capsys.readouterr().err
    assert all(f"{name} (2)" in listed for name in unread)


def test_flags_that_are_said_to_be_read_are_read() -> None:
    folder = SRC / "moefold" / "plan" / "published"
    source = "".join((folder / f"{name}.py").read_text() for name in ("records", "points"))
    read = set(re.findall(r'(?:flags|"flags"\) or \{\}\))\.get\("(\w+)"', source))
    # By the name in a loop.
    read |= {"ep_overlap", "delay_wgrad"}
    assert read == FLAGS_READ
