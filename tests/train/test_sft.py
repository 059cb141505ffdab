"""`moefold sft` and `moefold dpo`: from transformers' directory and tokens to a run, the same under every layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tests.checkpoint.hf_sources import loaded_by_transformers, saved_by_transformers
from tests.equations.test_dpo_equations import pairs
from tests.marks import slow_except

from moefold.blueprint.lora_adapters import is_adapter
from moefold.checkpoint.load import latest
from moefold.checkpoint.single_process import StoredWeights
from moefold.cli.main import main
from moefold.config.loading import load_run_file
from moefold.data.token_writers import MegatronWriter
from moefold.recipes.catalog import RECIPES

FAMILY = "qwen3_30b_a3b_proxy"
# float64, so that what layouts differ by is rounding far below the tolerance.
EXACT = ("--precision.params", "float64", "--precision.compute", "float64", "--kernels.experts", "sequential")
SMALL = ("--data.seq_len", "24", "--data.global_batch", "8", "--data.micro_batch", "2", "--optim.lr", "1e-2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "model"
    saved_by_transformers(RECIPES[FAMILY](), path)
    return path


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fifty documents, of whose tokens about half count in the loss; every third has one that counts alone."""
    prefix = str(tmp_path_factory.mktemp("tokens") / "chat")
    random = np.random.default_rng(0)
    with MegatronWriter(prefix, "uint8", with_loss_mask=True) as writer:
        for number in range(50):
            size = int(random.integers(3, 24))
            mask = random.random(size) < 0.5
            mask[-1] = True
            mask[:-1] &= number % 3 > 0
            writer.add(random.integers(0, 256, size).astype(np.uint8), mask)
    return prefix


def sft(name: str, out: Path, model: Path, tokens: str, *words: str) -> int:
    return main(["sft", name, "--from", str(model), "--data", tokens, "--out", str(out), *SMALL, *words])


def weights(out: Path, name: str) -> StoredWeights:
    found = latest(out / name / "checkpoints")
    assert found is not None
    return StoredWeights(found)


METHODS = {"full": (), "frozen router": ("--freeze-router",), "lora": ("--lora", "4", "--alpha", "6")}
LAYOUTS = {
    "dp4": (),
    "ep4 tp2": ("--parallel.ep", "4", "--parallel.tp", "2"),
    "pp2 ep2": ("--parallel.pp", "2", "--parallel.ep", "2"),
    "ep2 etp2 flat": ("--parallel.ep", "2", "--parallel.etp", "2", "--parallel.sharding", "flat"),
}
CASES = [(method, layout) for method in METHODS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("method", "layout"), slow_except(CASES, ("lora", "pp2 ep2"), ("full", "ep4 tp2"), ("lora", "ep2 etp2 flat"))
)
def test_four_ranks_end_where_one_process_ends(
    method: str, layout: str, model: Path, tokens: str, tmp_path: Path
) -> None:
    words = (*METHODS[method], *EXACT, "--train.steps", "3")
    assert sft("one", tmp_path, model, tokens, *words) == 0
    assert sft("four", tmp_path, model, tokens, *words, *LAYOUTS[layout], "--nproc", "4") == 0
    one, four = weights(tmp_path, "one"), weights(tmp_path, "four")
    assert sorted(one.names()) == sorted(four.names())
    before = StoredWeights(tmp_path / "one" / "checkpoints" / "step_00000000")
    moved = 0
    for name in one.names():
        a, b, start = (source.read(name).double() for source in (one, four, before))
        assert (a - b).abs().max() <= 1e-9 * max(1.0, float(a.abs().max())), name
        frozen = (method == "lora" and not is_adapter(name)) or (method == "frozen router" and ".router." in name)
        assert torch.equal(a, start) == frozen, name
        moved += not frozen
    assert moved


def test_masked_tokens_are_not_learned(model: Path, tokens: str, tmp_path: Path) -> None:
    """The first loss is the mean over labels that count, as transformers' model gives it."""
    assert sft("run", tmp_path, model, tokens, *EXACT, "--train.steps", "1") == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    loss = next(line["loss"] for line in lines if line["kind"] == "step")
    from moefold.data.samples import open_samples

    run = load_run_file(tmp_path / "run" / "config.yaml")
    samples, theirs = open_samples(run.data, 256, run.seed), loaded_by_transformers(model).double()
    total, count = 0.0, 0
    for number in range(run.data.global_batch):
        sample = samples.sample(number)
        assert sample.loss_mask is not None
        with torch.no_grad():
            logits = theirs(torch.from_numpy(sample.tokens[:-1])[None]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(sample.tokens[1:]), reduction="none")
        counted = torch.from_numpy(sample.loss_mask[1:])
        total, count = total + float(losses[counted].sum()), count + int(counted.sum())
    assert loss == pytest.approx(total / count, rel=2e-6)


def test_what_is_decided_is_said_and_goes_on(
    model: Path, tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--lora", "4", "--epochs", "0.5", "--precision.compute", "float32")
    assert sft("run", tmp_path, model, tokens, *words, "--prepare", "--json") == 0
    said = capsys.readouterr()
    notes = " | ".join(json.loads(said.out)["notes"])
    assert "50 samples, 0.5 epochs, 8 per step: 4 steps" in notes and "LoRA of rank 4, alpha 8" in notes
    run = load_run_file(tmp_path / "run" / "config.yaml")
    assert (run.optim.trained, run.optim.lr, run.optim.weight_decay) == ("adapters", 1e-2, 0.0)
    assert (run.optim.lr_schedule.kind, run.data.packing) == ("cosine", "bin_packed")
    # Trained for half of it, then to its end, then out of it.
    assert main(["sft", "run", "--out", str(tmp_path), "--train.steps", "2"]) == 0
    assert main(["sft", "run", "--out", str(tmp_path), "--train.steps", "4"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4]
    capsys.readouterr()
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "no")]) == 2
    assert "--merge" in capsys.readouterr().err
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge", "--check"]) == 0
    assert "logits equal" in capsys.readouterr().out
    assert main(["convert", "to-peft", str(tmp_path / "run"), str(tmp_path / "adapters")]) == 0
    _compare_with_peft(model, tmp_path)
    # The adapters go on in another run.
    words = ("--adapters", str(tmp_path / "adapters"), "--precision.compute", "float32", "--prepare")
    assert sft("more", tmp_path, model, tokens, *words) == 0
    first, more = weights(tmp_path, "run"), weights(tmp_path, "more")
    assert all(torch.equal(first.read(name), more.read(name)) for name in first.names())


def _compare_with_peft(model: Path, folder: Path) -> None:
    peft = pytest.importorskip("peft")
    merged = loaded_by_transformers(folder / "merged")
    adapted = peft.PeftModel.from_pretrained(loaded_by_transformers(model), str(folder / "adapters")).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sft", "x"], "--from"),
        (["sft", "x", "--from", "nowhere", "--data", "nothing"], "nothing"),
        (["sft", "../x", "--from", "a", "--data", "b"], "--name"),
        (["sft", "x", "--from", "a", "--data", "b", "--targets", "*"], "--lora RANK"),
    ],
)
def test_what_is_missing_is_said(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("checkpoints"))


def test_balance_is_kept_or_off_by_name(model: Path, tokens: str, tmp_path: Path) -> None:
    assert sft("off", tmp_path, model, tokens, "--prepare") == 0
    assert sft("kept", tmp_path, model, tokens, "--prepare", "--balance", "keep") == 0
    off, kept = (load_run_file(tmp_path / name / "config.yaml").model.moe for name in ("off", "kept"))
    assert off is not None and kept is not None
    # transformers pools the layers and counts every expert of a token.
    layers = RECIPES[FAMILY]().model.num_layers
    assert off.balance.microbatch == 0.0 and kept.balance.microbatch == pytest.approx(0.001 * kept.top_k / layers)


# ---- DPO ----

DPO_LAYOUTS = {
    "pp2 ep2": LAYOUTS["pp2 ep2"],
    "tp2 cp2 flat": ("--parallel.tp", "2", "--parallel.cp", "2", "--parallel.ep", "4", "--parallel.sharding", "flat"),
    "dp4": (),
}
DPO_CASES = [(method, layout) for method in ("lora", "full") for layout in DPO_LAYOUTS]


@pytest.mark.parametrize(("method", "layout"), slow_except(DPO_CASES, ("full", "pp2 ep2")))
def test_dpo_on_four_ranks_ends_where_one_process_ends(method: str, layout: str, model: Path, tmp_path: Path) -> None:
    tokens = pairs(tmp_path)
    # All pairs in every step.
    words = [*METHODS[method], *EXACT, *SMALL, "--data.global_batch", "24", "--train.steps", "2", "--beta", "0.5"]
    command = ["--from", str(model), "--data", tokens, "--out", str(tmp_path), *words]
    assert main(["dpo", "one", *command]) == 0
    assert main(["dpo", "four", *command, *DPO_LAYOUTS[layout], "--nproc", "4"]) == 0
    one, four = weights(tmp_path, "one"), weights(tmp_path, "four")
    for name in one.names():
        a, b = one.read(name).double(), four.read(name).double()
        assert (a - b).abs().max() <= 1e-9 * max(1.0, float(a.abs().max())), name
    records = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("one", "four")
    ]
    first, last = ([line for line in lines if line["kind"] == "step"] for lines in records)
    # At first policy and reference are the same, so that no answer has a reward.
    assert first[0]["loss"] == pytest.approx(0.6931471805599453, abs=1e-12)
    assert first[1]["loss"] < first[0]["loss"] and first[1]["metrics"]["reward_margin"] > 0
    for a, b in zip(first, last, strict=True):
        assert all(a[name] == pytest.approx(b[name], rel=1e-8) for name in ("loss", "grad_norm"))
        assert a["metrics"] == pytest.approx(b["metrics"], rel=1e-8, abs=1e-12)


def test_pairs_are_not_learned_as_text_nor_text_as_pairs(
    model: Path, tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = str(tmp_path / "odd")
    with MegatronWriter(odd, "uint8") as writer:
        for _ in range(3):
            writer.add(np.arange(5, dtype=np.uint8))
    assert main(["dpo", "x", "--from", str(model), "--data", odd, "--out", str(tmp_path), *SMALL]) == 2
    assert "3 documents are no pairs" in capsys.readouterr().err
    words = ["--data.seq_len", "8", "--data.global_batch", "4"]
    assert main(["dpo", "y", "--from", str(model), "--data", tokens, "--out", str(tmp_path), *words]) == 2
    assert "longer than data.seq_len" in capsys.readouterr().err


def test_conversations_and_pairs_become_tokens_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tokenizer in the model's own directory."""
    from tests.data.chat_templates import CHATML, chat_folder, plain

    from moefold.config.loading import override

    run = override(RECIPES[FAMILY](), ["model.vocab_size=704"])
    saved_by_transformers(run, tmp_path / "model")
    chat_folder(tmp_path / "model", plain(CHATML))
    turns = [{"role": "user", "content": "the weather in"}, {"role": "assistant", "content": "a question about tools"}]
    other = [turns[0], {"role": "assistant", "content": "and"}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(9)))
    rows = "".join(json.dumps({"chosen": turns, "rejected": other}) + "\n" for _ in range(9))
    (tmp_path / "pairs.jsonl").write_text(rows)
    words = ["--from", str(tmp_path / "model"), "--out", str(tmp_path / "runs"), "--lora", "4"]
    words += [
        "--data.global_batch",
        "6",
        "--data.seq_len",
        "64",
        "--precision.compute",
        "float32",
        "--optim.lr",
        "1e-2",
    ]
    assert main(["sft", "chat", "--data", str(tmp_path / "chat.jsonl"), *words]) == 0
    assert main(["dpo", "pairs", "--data", str(tmp_path / "pairs.jsonl"), *words]) == 0
    said = capsys.readouterr().err
    assert "9 samples, 1 epochs, 6 per step: 2 steps" in said and "18 samples, 1 epochs, 6 per step: 3 steps" in said
    # Neither reads the other's tokens.
    prefix = str(tmp_path / "runs" / "pairs" / "data" / "preference")
    assert main(["sft", "wrong", "--data", prefix, *words]) == 2
    assert "preference" in capsys.readouterr().err
