"""The report on two engines' log-probs: transformers on streamed weights agrees token by token, and mistakes show."""

from __future__ import annotations

import pytest
import torch
from tests.marks import slow_except

import moefold
from moefold.rl import Engine, Rollout, compare_logprobs

transformers = pytest.importorskip("transformers")


def sampled(engine: Engine, temperature: float) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Tokens that transformers samples from the engine's weights, which of them it sampled, and their log-probs."""
    config = transformers.AutoConfig.for_model(**engine.hf_config(64))
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=dict(engine.weights()))
    torch.manual_seed(1)
    prompts = torch.randint(1, 200, (4, 3))
    out = model.eval().generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        temperature=temperature,
        max_new_tokens=6,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    answers = (torch.stack(out.logits, 1) / temperature).log_softmax(-1).gather(2, out.sequences[:, 3:, None])[..., 0]
    logprobs = torch.cat([torch.zeros(4, 3), answers], 1)
    counted = (torch.arange(9) >= 3).expand(4, 9)
    return list(out.sequences), list(counted), list(logprobs)


@pytest.mark.parametrize("temperature", slow_except([1.0, 0.6], 0.6))
def test_transformers_on_streamed_weights_agrees(temperature: float) -> None:
    engine = Engine(moefold.load_run("qwen3_30b_a3b_proxy", {"model.num_layers": 2}))
    tokens, counted, theirs = sampled(engine, temperature)
    rollouts = [Rollout(row, mask) for row, mask in zip(tokens, counted, strict=True)]
    report = compare_logprobs(
        engine.score(rollouts, temperature=temperature).logprobs, theirs, counted, tokens, tolerance=1e-4
    )
    assert report.matches and report.tokens == 24 and report.max_abs_difference < 1e-5
    assert report.text().startswith("log-probs match: 0 of 24 tokens differ by more than 0.0001")

    # Another temperature shows at almost every token.
    wrong = compare_logprobs(engine.score(rollouts, temperature=2.0).logprobs, theirs, counted, tokens, tolerance=1e-4)
    assert not wrong.matches and wrong.beyond > 20 and wrong.as_json()["matches"] is False
    first = wrong.worst[0]
    assert abs(first.difference) == pytest.approx(wrong.max_abs_difference)
    assert first.token == int(tokens[first.rollout][first.place]) and f"{first.ours:.5f}" in wrong.text()


def test_numbers_of_the_report() -> None:
    """By hand: differences 0.1 and -0.3, and one token that is not counted; a NaN is never a match."""
    ours = [torch.tensor([0.0, -1.0, -2.0]), torch.tensor([-9.0, -1.3])]
    theirs = [torch.tensor([0.0, -1.1, -2.0]), torch.tensor([-1.0, -1.0])]
    counted = [torch.tensor([False, True, True]), torch.tensor([False, True])]
    tokens = [torch.tensor([4, 5, 6]), torch.tensor([7, 8])]
    report = compare_logprobs(ours, theirs, counted, tokens, tolerance=0.2)
    assert (report.tokens, report.beyond) == (3, 1)
    assert report.mean_difference == pytest.approx((0.1 - 0.3) / 3, abs=1e-6)
    assert report.mean_abs_difference == pytest.approx(0.4 / 3, abs=1e-6)
    assert report.kl == pytest.approx(((1.1051709 - 1.1) + (0.7408182 - 0.7)) / 3, abs=1e-6)
    assert report.ratios == pytest.approx((0.7408182, 1.1051709), abs=1e-6)
    assert (report.worst[0].rollout, report.worst[0].place, report.worst[0].token) == (1, 1, 8)
    ours[0][1] = torch.nan
    assert not compare_logprobs(ours, theirs, counted, tokens, tolerance=9.0).matches
    with pytest.raises(moefold.MoefoldError, match="same shapes"):
        compare_logprobs(ours[:1], theirs, counted, tokens)
