"""Generation: cached against the full forward and against transformers, sampling, stops, and the verbs around it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.checkpoint.hf_sources import loaded_by_transformers, saved_by_transformers
from tests.hf_weights import randomize
from tests.marks import slow_except
from tests.published_models import hf_model, small, transformers_in_float64

from moefold.checkpoint.trained_model import TrainedModel, open_trained
from moefold.cli.main import main
from moefold.config.moe import CapacityConfig
from moefold.data.token_writers import MegatronWriter
from moefold.errors import DataError
from moefold.model.generation import (
    Sampling,
    _CachedLogits,
    choose,
    filtered_probs,
    generate,
    generate_reference,
    last_logits,
)
from moefold.model.scoring import perplexity, score, windows
from moefold.nn.batch import whole_batch
from moefold.recipes.catalog import RECIPES

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)
PROMPTS = [[5, 17, 99, 4], [200, 3], [7], list(range(10, 31))]
HYBRID = "Qwen3-Next-80B-A3B"
# GQA with qk-norm, MLA with shared experts and a loss-free bias, sinks and windows.
FAMILIES = ("qwen3_30b_a3b_proxy", "deepseek_v3_proxy", "gpt_oss_20b_proxy", "mixtral_8x7b_proxy")


def saved(family: str, path: Path) -> torch.nn.Module:
    if family in RECIPES:
        return saved_by_transformers(RECIPES[family](), path / family)
    model = hf_model(small(family)).float().eval()
    randomize(model, seed=1)
    model.save_pretrained(path / family)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainedModel]:
    return {}


def opened(family: str, models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    if family not in models:
        folder = tmp_path_factory.mktemp("hf")
        saved(family, folder)
        models[family] = open_trained(folder / family, CPU, "float32")
    return models[family]


@pytest.mark.parametrize("family", slow_except(FAMILIES, *FAMILIES[:3]))
def test_cached_equals_full_forward_and_transformers(
    family: str, models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = opened(family, models, tmp_path_factory)
    cached = generate(model.decoder, model.cache, PROMPTS, 24, GREEDY)
    whole = generate_reference(model.decoder, PROMPTS, 24, GREEDY)
    assert [one.tokens for one in cached] == [one.tokens for one in whole]
    for one, other in zip(cached, whole, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=0)
    theirs = loaded_by_transformers(model.path)
    for prompt, one in zip(PROMPTS, cached, strict=True):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert (
            theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
            == one.tokens
        )


def test_a_hybrid_says_what_transformers_says(
    models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Recurrent states and inputs of convolutions in the place of keys, after prompts of 1 to 90 tokens; in float64,
    because in float32 both are some 1e-4 from it."""
    model = open_trained(opened(HYBRID, models, tmp_path_factory).path, CPU, "float64")
    prompts = [[token % model.vocab_size for token in prompt] for prompt in (*PROMPTS, range(0, 630, 7))]
    cached = generate(model.decoder, model.cache, prompts, 12, GREEDY)
    whole = generate_reference(model.decoder, prompts, 12, GREEDY)
    assert [one.tokens for one in cached] == [one.tokens for one in whole]
    theirs = loaded_by_transformers(model.path).double()
    with transformers_in_float64(theirs):
        for prompt, one in zip(prompts, cached, strict=True):
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            found = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert found[0, len(prompt) :].tolist() == one.tokens


def test_steps_after_prompts_of_a_hybrid_are_those_of_the_full_forward(
    models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Prompts of several chunks, of one and of two tokens first, then token by token."""
    model = open_trained(opened(HYBRID, models, tmp_path_factory).path, CPU, "float64")
    assert model.run.model.linear_attention is not None
    random = torch.Generator().manual_seed(1)
    texts = [torch.randint(model.vocab_size, (size,), generator=random).tolist() for size in (150, 11, 12)]
    prompts = [text[:-10] for text in texts]
    logits = _CachedLogits(model.decoder, model.cache, prompts)
    with torch.no_grad():
        model.cache.begin(3, 150)
        found = [logits.first()] + [logits.step([text[at] for text in texts]) for at in range(-10, 0)]
        model.cache.begin(0, 0)
        for back, each in zip(range(-10, 1), found, strict=True):
            expected = last_logits(model.decoder, [text[: len(text) + back] for text in texts])
            torch.testing.assert_close(each, expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("lost", ["states", "conv_inputs"])
def test_a_cache_that_loses_what_a_delta_net_keeps_is_noticed(
    lost: str,
    models: dict[str, TrainedModel],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = opened(HYBRID, models, tmp_path_factory)
    prompts = [[token % model.vocab_size for token in prompt] for prompt in PROMPTS]
    monkeypatch.setattr(model.cache, lost, _Forgetful())
    cached = generate(model.decoder, model.cache, prompts, 12, GREEDY)
    whole = generate_reference(model.decoder, prompts, 12, GREEDY)
    assert [one.tokens for one in cached] != [one.tokens for one in whole]


class _Forgetful(dict[int, torch.Tensor]):
    def __setitem__(self, layer: int, kept: torch.Tensor) -> None: ...


@pytest.mark.parametrize("family", ["deepseek_v3_proxy", HYBRID])
def test_logits_of_every_step_and_the_experts_are_those_of_the_full_forward(
    family: str, models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Token by token through the cache, in float64: the same logits, and in every layer the same experts."""
    path = opened(family, models, tmp_path_factory).path
    model = open_trained(path, CPU, "float64")
    text = torch.randint(model.vocab_size, (2, 19), generator=torch.Generator().manual_seed(0))
    seen: list[list[torch.Tensor]] = [[], []]
    into = seen[0]
    hooks = [
        router.register_forward_hook(lambda module, args, out: into.append(out[0].experts))
        for router in model.decoder.routers().values()
    ]
    whole = whole_batch(text.flatten(), text.flatten(), (19, 19), step_labels=38, step_tokens=38, step_sequences=2)
    with torch.no_grad():
        expected = model.decoder.logits(whole).view(2, 19, -1)
        into = seen[1]
        model.cache.begin(2, 19)
        found = []
        for at in range(19):
            model.cache.used = at + 1
            one = whole_batch(text[:, at], text[:, at], (1, 1), step_labels=2, step_tokens=2, step_sequences=2)
            found.append(model.decoder.logits(replace(one, positions_S=torch.full((2,), at))))
        model.cache.begin(0, 0)
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(torch.stack(found, 1), expected, atol=1e-11, rtol=0)
    layers = len(seen[0])
    assert layers > 0 and len(seen[1]) == 19 * layers
    for layer, full in enumerate(seen[0]):
        steps = torch.stack(seen[1][layer::layers], 1).flatten(0, 1)
        assert torch.equal(full.sort(-1).values, steps.sort(-1).values)


def test_a_cache_that_forgets_a_key_is_noticed(
    models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(FAMILIES[0], models, tmp_path_factory)
    from moefold.attention import kv_cache

    plain = kv_cache.attend_cached
    monkeypatch.setattr(
        kv_cache, "attend_cached", lambda q, k, v, at, *rest: plain(q, k, v, (at - 1).clamp(min=0), *rest)
    )
    cached = generate(model.decoder, model.cache, PROMPTS, 24, GREEDY)
    whole = generate_reference(model.decoder, PROMPTS, 24, GREEDY)
    assert [one.logprobs for one in cached] != [one.logprobs for one in whole]
    assert [one.tokens for one in cached] != [one.tokens for one in whole]


def test_sampling_does_not_depend_on_the_batch_and_follows_the_seed(
    models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = opened(FAMILIES[0], models, tmp_path_factory)
    warm = Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=3)
    together = generate(model.decoder, model.cache, [PROMPTS[0], PROMPTS[3]], 12, warm)
    alone = generate(model.decoder, model.cache, [PROMPTS[0]], 12, warm)
    assert together[0].tokens == alone[0].tokens
    assert [one.tokens for one in together] == [
        one.tokens for one in generate_reference(model.decoder, [PROMPTS[0], PROMPTS[3]], 12, warm)
    ]
    other = generate(model.decoder, model.cache, [PROMPTS[0]], 12, replace(warm, seed=4))
    assert other[0].tokens != alone[0].tokens
    twice = generate(model.decoder, model.cache, [PROMPTS[0]] * 2, 12, warm)
    assert twice[0].tokens == alone[0].tokens != twice[1].tokens


def test_a_stop_token_ends_one_sequence_and_not_the_others(
    models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = opened(FAMILIES[0], models, tmp_path_factory)
    free = generate(model.decoder, model.cache, PROMPTS, 16, GREEDY)
    stop = next(token for token in free[0].tokens if all(token not in one.tokens for one in free[1:]))
    found = generate(model.decoder, model.cache, PROMPTS, 16, GREEDY, frozenset({stop}))
    assert found[0].stopped and found[0].tokens == free[0].tokens[: free[0].tokens.index(stop) + 1]
    assert [one.tokens for one in found[1:]] == [one.tokens for one in free[1:]]


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(1.3, top_k=7), Sampling(1.0, 0, 0.6), Sampling(2, 20, 0.8)]
)
def test_filters_are_those_of_transformers(sampling: Sampling) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(1)) * 3
    theirs = TemperatureLogitsWarper(float(sampling.temperature))(None, logits)
    if sampling.top_k:
        theirs = TopKLogitsWarper(sampling.top_k)(None, theirs)
    if sampling.top_p < 1:
        theirs = TopPLogitsWarper(sampling.top_p)(None, theirs)
    ours = filtered_probs(logits, sampling)
    torch.testing.assert_close(ours / ours.sum(-1, keepdim=True), theirs.softmax(-1))


def test_draws_have_their_probs() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20_000, -1)
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares = torch.bincount(choose(logits, Sampling(1.0), uniform), minlength=4) / 20_000
    # Four standard deviations of a share of 20,000 draws are at most 0.014.
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.014, rtol=0)


def test_scores_are_those_of_transformers(
    models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = opened(FAMILIES[0], models, tmp_path_factory)
    theirs = loaded_by_transformers(model.path)
    texts, firsts = [list(range(3, 40)), [9, 8, 7]], [20, 1]
    for text, first, one in zip(texts, firsts, score(model.decoder, texts, firsts), strict=True):
        with torch.no_grad():
            logprobs = theirs(torch.tensor([text])).logits[0].log_softmax(-1)
        expected = torch.stack([logprobs[at - 1, text[at]] for at in range(first, len(text))])
        torch.testing.assert_close(one.logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("tokens", "context", "stride"), [(100, 16, 16), (100, 16, 5), (2, 16, 16), (17, 16, 16)])
def test_every_token_but_the_first_is_predicted_once(tokens: int, context: int, stride: int) -> None:
    cut = list(windows(tokens, context, stride))
    assert [at for window in cut for at in range(window.first, window.end)] == list(range(1, tokens))
    assert all(window.start < window.first and window.end - 1 - window.start <= context for window in cut)


def test_perplexity_is_the_mean_over_windows(
    models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = opened(FAMILIES[0], models, tmp_path_factory)
    text = torch.randint(model.vocab_size, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    cut = list(windows(50, 16, 8))
    found = perplexity(model.decoder, lambda start, length: text[start : start + length], cut, batch=3)
    total = 0.0
    for window in cut:
        for at in range(window.first, window.end):
            logits = last_logits(model.decoder, [text[window.start : at]])
            total -= float(logits.log_softmax(-1)[0, text[at]])
    assert found.tokens == 49 and found.loss == pytest.approx(total / 49, abs=1e-4)


def test_only_tokens_of_a_loss_mask_count(
    models: dict[str, TrainedModel],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of two conversations, each for itself; a mask of zeros gives no number at all."""
    model = opened(FAMILIES[0], models, tmp_path_factory)
    documents = [list(range(3, 15)), [40, 9, 77, 9, 5]]
    masks = [[at in (5, 6, 11) for at in range(12)], [False, False, True, True, False]]
    for name, keep in (("chat", True), ("silent", False)):
        with MegatronWriter(str(tmp_path / name), np.uint16, with_loss_mask=True) as writer:
            for tokens, mask in zip(documents, masks, strict=True):
                writer.add(np.array(tokens), np.array(mask) & keep)
    total = 0.0
    for tokens, mask in zip(documents, masks, strict=True):
        for at in (at for at, counts in enumerate(mask) if counts):
            total -= last_logits(model.decoder, [tokens[:at]]).log_softmax(-1)[0, tokens[at]].item()
    words = ["eval", str(model.path), "--tokenizer", "bytes", "--dtype", "float32", "--json"]
    assert main([*words, "--data", str(tmp_path / "chat")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["counted"]) == (5, "those of the loss mask")
    assert found["loss"] == pytest.approx(total / 5, abs=1e-5)
    assert main([*words, "--data", str(tmp_path / "silent")]) == 2
    assert "its loss mask counts no token" in capsys.readouterr().err


def test_capacities_do_not_drop_tokens_when_the_model_is_used(tmp_path: Path) -> None:
    from moefold.checkpoint.trained_model import usable

    model = RECIPES["debug_tiny"]().model
    assert model.moe is not None
    tight = replace(model, moe=replace(model.moe, capacity=CapacityConfig(factor=0.5)))
    used = usable(tight).moe
    assert used is not None and used.capacity is None


def test_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of two steps: generated from, evaluated on a text and on tokens, and exported with the same answers."""
    changes = ["--train.steps", "2", "--train.directory", str(tmp_path)]
    assert main(["train", "debug_tiny", *changes]) == 0
    source, exported = str(tmp_path / "debug_tiny"), str(tmp_path / "exported")
    assert main(["convert", "to-hf", source, exported]) == 0
    capsys.readouterr()
    said, losses = [], []
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 20)
    for each in (source, exported):
        words = ["--prompt", "def ", "--prompt", "import", "--temperature", "0", "--max-new", "8", "--dtype", "float32"]
        assert main(["generate", each, *words, "--json"]) == 0
        said.append([json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()])
        assert main(["eval", each, "--text", str(tmp_path / "text.txt"), "--dtype", "float32", "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1] and len(said[0]) == 2
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], abs=1e-6) and losses[0]["tokens"] == 459
    assert losses[0]["bits_per_byte"] == pytest.approx(losses[0]["loss"] / 0.6931472 * 459 / 460, rel=1e-6)
    assert main(["eval", source, "--data", "builtin", "--limit", "4", "--json"]) == 0
    assert 4 < json.loads(capsys.readouterr().out)["loss"] < 7
    assert main(["generate", source, "--prompt", "a", "--max-new", "3", "--no-cache"]) == 0
    assert capsys.readouterr().out.startswith("a")
    assert main(["generate", source, "--chat", "--prompt", "hello"]) == 2
    assert "a byte vocabulary has no chat template" in capsys.readouterr().err


TEMPLATE = """{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}"""


def chat_tokenizer(folder: Path, template: str | None) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    built = Tokenizer(models.BPE(letters, []))
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<|end|>", chat_template=template)
    wrapped.add_special_tokens({"additional_special_tokens": special})
    wrapped.save_pretrained(folder)
    return folder


def test_a_chat_is_what_the_template_makes_of_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from moefold.data.text_codec import open_codec

    codec = open_codec(None, chat_tokenizer(tmp_path, TEMPLATE), 512)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "h\u00e9llo <world>"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert codec.chat(messages) == expected and expected[-1] == theirs.convert_tokens_to_ids("<|assistant|>")
    assert codec.decode(codec.encode("h\u00e9llo")) == "h\u00e9llo" and codec.stop == {theirs.eos_token_id}
    with pytest.raises(DataError, match="has 260 tokens, but the model only 256"):
        open_codec(str(tmp_path), None, 256)
    with pytest.raises(DataError, match="no chat template"):
        open_codec(str(chat_tokenizer(tmp_path / "plain", None)), None, 512).chat(messages)


TASK = """task: copy_last
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: {kind}
training_split: null
test_split: train
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
target_delimiter: ""
{more}
"""


@pytest.mark.slow
def test_tasks_of_the_harness(
    models: dict[str, TrainedModel], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local tasks, no network: choices are those that `score` finds likelier, and generated answers the model's own."""
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    pytest.importorskip("lm_eval")
    from moefold.api.lm_eval_adapter import evaluate_tasks
    from moefold.data.text_codec import ByteCodec

    model, codec, folder = opened(FAMILIES[0], models, tmp_path_factory), ByteCodec(), tmp_path_factory.mktemp("tasks")
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    documents = [
        {"question": f"number {n} is", "choices": [" odd", " even", " nine"], "label": n % 3} for n in range(6)
    ]
    right, greedy = 0, 0
    for document in documents:
        asked = codec.encode(document["question"])
        texts = [asked + codec.encode(choice) for choice in document["choices"]]
        sums = [float(one.logprobs.sum()) for one in score(model.decoder, texts, [len(asked)] * 3)]
        right += sums.index(max(sums)) == document["label"]
        said = generate(model.decoder, model.cache, [asked], 5, GREEDY, codec.stop)[0].tokens
        document["answer"] = codec.decode(said) if document["label"] else "something else"
        greedy += document["label"] != 0
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    choice = "doc_to_choice: choices\nmetric_list: [{metric: acc}]"
    written = "generation_kwargs: {max_gen_toks: 5, until: []}\nmetric_list: [{metric: exact_match}]"
    shown = {"data": folder / "documents.jsonl"}
    (folder / "choice.yaml").write_text(TASK.format(**shown, kind="multiple_choice", target="{{label}}", more=choice))
    text = TASK.format(**shown, kind="generate_until", target="{{answer}}", more=written)
    (folder / "written.yaml").write_text(text.replace("copy_last", "written"))
    found = evaluate_tasks(model, codec, ["copy_last", "written"], str(folder), None, 64)
    assert found["copy_last"]["acc,none"] == pytest.approx(right / 6)
    assert found["written"]["exact_match,none"] == pytest.approx(greedy / 6) == pytest.approx(4 / 6)
