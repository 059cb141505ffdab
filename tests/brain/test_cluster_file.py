"""Clusters of one's own, described in a file: what is read, what is refused, and what the planner makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moefold
from moefold.cli.main import main
from moefold.errors import ConfigError
from moefold.hardware.cluster import GPUS, cluster_of, read_cluster
from moefold.plan.report.form import form_html, question_of_form, values_of

OWN = """
gpus: 64
gpu: {like: H100, name: H100-94G, memory_gb: 94, watts: 600}
nic_gb_s: 45
network: roce
cost_per_gpu_hour: 2.4
"""


def written(path: Path, text: str) -> Path:
    path = path / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_name_alone_is_the_usual_cluster(tmp_path: Path) -> None:
    assert read_cluster(written(tmp_path, "gpu: GB200\ngpus: 256\n")) == cluster_of("GB200", 256)
    assert read_cluster(written(tmp_path, "gpu: gb200\ngpus: 256\n")) == cluster_of("GB200", 256)


def test_what_differs_is_taken_and_the_rest_is_the_gpus(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, OWN), num_gpus=128)
    usual = GPUS["H100"]
    assert (cluster.num_gpus, cluster.domain, cluster.nic_gb_s, cluster.network) == (128, 8, 45, "roce")
    assert (cluster.gpu.name, cluster.gpu.memory_gb, cluster.gpu.watts) == ("H100-94G", 94, 600)
    assert cluster.gpu.bf16_tflops == usual.bf16_tflops and cluster.gpu.link_gb_s == usual.link_gb_s
    assert cluster.cost_per_gpu_hour == 2.4


def test_a_gpu_that_differs_does_not_pass_for_its_namesake(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, "gpu: {like: h100, memory_gb: 94}\ngpus: 8\n"))
    assert cluster.gpu.name == "H100 (own)"


def test_a_gpu_of_ones_own_has_every_figure(tmp_path: Path) -> None:
    usual = GPUS["B200"]
    section = "".join(f"  {name}: {getattr(usual, name)}\n" for name in vars(usual) if name != "name")
    cluster = read_cluster(written(tmp_path, f"gpus: 8\ngpu:\n  name: mine\n{section}"))
    assert cluster.gpu.name == "mine" and cluster.gpu.memory_gb == usual.memory_gb
    # Only plans that ask for SMs need their number.
    few = section.replace(f"  sms: {usual.sms}\n", "")
    assert read_cluster(written(tmp_path, f"gpus: 8\ngpu:\n  name: mine\n{few}")).gpu.sms == 0
    with pytest.raises(ConfigError, match=r"gpu: without `like`, and without fp8_tflops"):
        read_cluster(written(tmp_path, "gpus: 8\ngpu: {name: mine, bf16_tflops: 100}\n"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu: H100\ngpus: 8\nnic: 50\n", r"nic: unknown key.*nic_gb_s"),
        ("gpu: {like: H100, memory: 94}\ngpus: 8\n", r"gpu.memory: unknown key.*memory_gb"),
        ("gpu: H1000\ngpus: 8\n", r"gpu: is 'H1000'.*H100"),
        ("gpu: {like: h}\ngpus: 8\n", r"gpu.like: is 'h'"),
        ("gpu: H100\n", r"gpus: how many GPUs"),
        ("gpu: H100\ngpus: 0\n", r"gpus: is 0.*positive"),
        ("gpu: {like: H100, memory_gb: -1}\ngpus: 8\n", r"gpu.memory_gb: is -1.*positive"),
        ("gpu: H100\ngpus: 8\nnetwork: ethernet\n", r"network: .*ib, roce, efa"),
        ("gpus: 8\n", r"gpu: "),
        ("gpu: H100\ngpus: 8\nnic_gb_s: .nan\n", r"nic_gb_s|no cluster"),
        ("[1, 2]\n", r"describes no cluster|known here"),
        ("gpu: H100\ngpu: H200\ngpus: 8\n", r"gpu: line 2: this key is in line 1"),
        ("gpu: [", r"not YAML"),
    ],
)
def test_a_file_that_describes_no_cluster_is_refused_with_its_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_cluster(written(tmp_path, text))


def test_all_problems_of_a_file_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_cluster(written(tmp_path, "gpu: {like: H1000, watts: -5}\ngpus: 0\n"))
    assert all(word in str(caught.value) for word in ("gpu.like", "gpu.watts", "gpus"))


def test_the_plan_is_that_of_the_same_gpu_by_name_and_says_what_it_costs(tmp_path: Path) -> None:
    run = moefold.load_run("qwen3_30b_a3b")
    named = moefold.plan(run, gpu="H100", gpus=64, search=False)
    own = moefold.plan(run, cluster=written(tmp_path, "gpu: H100\ngpus: 64\ncost_per_gpu_hour: 2\n"), search=False)
    assert own.step_seconds == named.step_seconds and own.memory_bytes == named.memory_bytes
    assert named.cost is None
    assert own.cost == pytest.approx(64 * 2 * 24 * own.days)
    assert own.megawatt_hours == pytest.approx(64 * 700e-6 * 24 * own.days)


def test_more_memory_fits_more(tmp_path: Path) -> None:
    run = moefold.load_run("qwen3_30b_a3b")
    plan = moefold.plan(run, cluster=written(tmp_path, OWN), search=False)
    assert plan.capacity_bytes / moefold.plan(run, gpus=64, search=False).capacity_bytes == pytest.approx(94 / 80)


def test_the_form_keeps_the_cluster_that_the_server_was_started_with(tmp_path: Path) -> None:
    run = moefold.load_run("qwen3_30b_a3b")
    first = moefold.plan(run, cluster=written(tmp_path, OWN), search=False).proposal.question
    values = values_of(first)
    assert question_of_form(values, first).cluster == first.cluster
    assert "H100-94G" in form_html(values, first)
    other = question_of_form(values | {"gpu": "H200", "gpus": "128"}, first).cluster
    assert (other.gpu, other.num_gpus, other.network, other.cost_per_gpu_hour) == (GPUS["H200"], 128, "roce", None)


def test_the_command_line_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, OWN))
    asked = ["plan", "qwen3_30b_a3b", "--no-search", "--cluster", path, "--nic", "50"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cost"] > 0 and found["megawatt_hours"] > 0
    main(asked)
    words = " ".join(capsys.readouterr().out.split())
    assert "64 H100-94G" in words and "50 GB/s network" in words and "at 2.4 per hour that costs" in words
    assert main([*asked, "--gpu", "H200"]) == 2
    assert "leave one of them out" in " ".join(capsys.readouterr().err.split())
