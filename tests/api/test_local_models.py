"""Models that a person calls on one process: the same numbers that the trainer's own path computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moefold
from moefold.config.moe import BalanceConfig
from moefold.errors import ConfigError, UnknownNameError
from moefold.model.generation import generate_reference
from moefold.model.scoring import score
from moefold.nn.batch import whole_batch


def run_named(name: str, **changes: object) -> moefold.RunConfig:
    return moefold.load_run(name, {"kernels.experts": "sequential", **changes})


def ids(batch: int, length: int, vocab: int = 256) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", ["debug_tiny", "deepseek_v3_proxy"])
def test_loss_and_logits_are_the_decoders(name: str) -> None:
    run = run_named(name)
    model, tokens = moefold.build_model(run), ids(3, 9)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[1, 5:] = -100
    output = model(inputs, labels)
    counted = int((labels != -100).sum())
    batch = whole_batch(
        inputs.reshape(-1),
        labels.reshape(-1),
        (8,) * 3,
        step_labels=counted,
        step_tokens=24,
        step_sequences=3,
        num_ahead=run.model.num_mtp,
    )
    expected = model.decoder(batch)
    assert output.loss is not None and output.aux_loss is not None
    assert torch.equal(output.loss, expected.loss_sum / counted)
    torch.testing.assert_close(output.logits.view(24, -1), model.decoder.logits(batch))
    balance = sum(sum(report.losses) for _, report in expected.reports)
    mtp = sum(expected.ahead_loss_sums) * run.model.mtp_weight / 24 if run.model.num_mtp else 0.0
    assert output.aux_loss.item() == pytest.approx(float(torch.as_tensor(balance + mtp).detach()))
    cross_entropy = torch.nn.functional.cross_entropy(output.logits.view(24, -1), labels.reshape(-1))
    assert output.loss.item() == pytest.approx(cross_entropy.item(), rel=1e-5)


def test_sequences_do_not_see_each_other() -> None:
    model, tokens = moefold.build_model(run_named("debug_tiny")), ids(2, 7)
    together = model(tokens).logits
    for sequence, logits in zip(tokens, together, strict=True):
        torch.testing.assert_close(model(sequence).logits, logits)
    with pytest.raises(ValueError, match=r"labels have the shape \(2, 6\)"):
        model(tokens, tokens[:, 1:])


@pytest.mark.parametrize("token", [256, 10**6, -1])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    model = moefold.build_model(moefold.load_run("debug_tiny"))
    good, bad = torch.tensor([[1, 2, 3]]), torch.tensor([[1, token, 3]])
    with pytest.raises(moefold.MoefoldError, match=f"tokens: from .*{token}.*256"):
        model(bad)
    with pytest.raises(moefold.MoefoldError, match=f"labels: from .*{token}.*256"):
        model(good, labels=bad)
    for write in (lambda: generate_reference(model.decoder, [[1], [2, token]], 1), lambda: score_one(model, token)):
        with pytest.raises(moefold.MoefoldError, match=r"position 1: token .* is outside the vocabulary of 256"):
            write()


def score_one(model: moefold.LanguageModel, token: int) -> object:
    return score(model.decoder, [[1, token, 2]], [1])


def test_the_layout_of_the_run_does_not_matter() -> None:
    alone, parallel = (moefold.build_model(run_named("debug_tiny", **{"parallel.ep": ep})) for ep in (1, 4))
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), parallel.parameters(), strict=True))
    with pytest.raises(ConfigError, match=r"model\.moe\.top_k"):
        moefold.build_model(run_named("debug_tiny", **{"model.moe.top_k": 9}))


def test_a_layer_is_the_first_layer_of_a_model() -> None:
    run = run_named("debug_tiny")
    block = moefold.build_model(run).decoder.layers["0"].feed_forward
    layer = moefold.MoELayer.from_config(run.model.moe, dim=run.model.dim)
    expected = block.state_dict()
    assert layer.layer.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in layer.layer.state_dict().items())


def test_a_layer_computes_what_its_experts_say() -> None:
    """Written out by loops over tokens and experts."""
    layer = moefold.MoELayer.from_config(dim=6, num_experts=4, top_k=2, expert_hidden_dim=5, dtype=torch.float64)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    routing, experts = layer.route(x), layer.layer.experts
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for t, row in enumerate(x.view(6, 6)):
        for expert, prob in zip(routing.experts[t], routing.probs[t], strict=True):
            gate, up = experts.gate_up[expert] @ row
            expected[t] += prob * (experts.down[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(layer(x), expected.view(2, 3, 6))


def test_balance_losses_are_per_sequence() -> None:
    balance = BalanceConfig(sequence=1.0)
    config = replace(run_named("debug_tiny").model.moe, balance=balance)
    layer = moefold.MoELayer.from_config(config, dim=8, init_std=0.5)
    x = torch.randn(2, 5, 8)
    both = layer.forward_with_report(x)[1].losses.sequence
    each = [layer.forward_with_report(part)[1].losses.sequence for part in x]
    torch.testing.assert_close(both, sum(each) / 2)


def test_what_is_wrong_with_a_layer_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as found:
        moefold.MoELayer.from_config(dim=8, num_expert=4, router={"score": "tanh"})
    assert {problem.path for problem in found.value.problems} == {"model.moe.num_expert", "model.moe.router.score"}
    with pytest.raises(ConfigError, match="top_k"):
        moefold.MoELayer.from_config(dim=8, num_experts=2, top_k=3)


class LastExperts:
    """The experts with the highest numbers, whatever the scores."""

    def select(self, logits_tE: Tensor, scores_tE: Tensor, *_: object) -> moefold.TopKAssignment:
        return moefold.TopKAssignment(torch.tensor([6, 7]).expand(len(scores_tE), 2))


class Made(LastExperts):
    def __init__(self, config: object) -> None:
        self.config = config


@pytest.mark.parametrize(
    "policy", [LastExperts(), Made, lambda config: Made(config)], ids=["object", "class", "function"]
)
def test_an_own_policy_decides(policy: object) -> None:
    layer = moefold.MoELayer.from_config(dim=8, num_experts=8, routing_policy=policy)  # type: ignore[arg-type]
    assert layer.forward_with_report(torch.randn(5, 8))[1].counts_E.tolist() == [0] * 6 + [5, 5]
    model = moefold.build_model(run_named("debug_tiny"), routing_policy=policy)  # type: ignore[arg-type]
    assert {type(router.routing_policy) for router in model.decoder.routers().values()} <= {LastExperts, Made}
    for mode in (model.train(), model.eval()):
        assert torch.isfinite(mode(ids(1, 4)).logits).all()


def test_a_policy_by_name() -> None:
    layer = moefold.MoELayer.from_config(dim=8, num_experts=8, routing_policy="balanced")
    assert layer.forward_with_report(torch.randn(4, 8))[1].counts_E.tolist() == [1] * 8
    with pytest.raises(UnknownNameError, match="did you mean 'sinkhorn'"):
        moefold.MoELayer.from_config(dim=8, routing_policy="sinkhron")
    with pytest.raises(TypeError, match="has a method `select`"):
        moefold.MoELayer.from_config(dim=8, routing_policy=3)  # type: ignore[arg-type]


def test_runs_come_from_names_files_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nparallel: {ep: 2}\n")
    for source in (path, str(path)):
        assert moefold.load_run(source).parallel.ep == 2
    assert moefold.load_run("Debug-Tiny", ["--parallel.ep", "4"]) == moefold.load_run("debug_tiny", {"parallel.ep": 4})
    assert moefold.load_run(moefold.load_run(path), {"parallel.ep": 8}).name == "mine"
