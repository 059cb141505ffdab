"""The RL engine over layouts: log-probs, losses, replayed routing, released memory, all against one process."""

from __future__ import annotations

import doctest
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.checkpoint.hf_sources import saved_by_transformers
from tests.marks import slow_except
from torch import Tensor
from torch.distributed.tensor import DTensor

import moefold
from moefold.api.runs import load_run
from moefold.comm.spawn import spawn_ranks
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, MoefoldError
from moefold.nn.batch import whole_batch
from moefold.pipeline import step as pipeline_step
from moefold.rl import Engine, Rollout
from moefold.rl import engine as module
from moefold.rl.policy_losses import PolicyLoss, clipped_ratio
from moefold.rl.rollouts import pack

FLOAT64 = {
    "precision.compute": "float64",
    "precision.params": "float64",
    "model.num_layers": 2,
    "kernels.experts": "sequential",
    "model.moe.balance.microbatch": 0.0,
    "optim.clip_norm": 1e9,
}
LAYOUTS: list[tuple[int, dict[str, object]]] = [
    (4, {"parallel.pp": 2, "parallel.tp": 2, "parallel.ep": 2}),
    (4, {"parallel.tp": 2, "parallel.cp": 2, "parallel.ep": 4}),
    (4, {"parallel.pp": 2, "parallel.cp": 2, "parallel.ep": 2}),
    (4, {"parallel.cp": 2, "parallel.ep": 4}),
    (2, {"parallel.ep": 2, "parallel.sharding": "flat"}),
    (2, {"parallel.pp": 2, "parallel.vpp": 2, "model.num_layers": 4, "parallel.schedule": "dualpipe_v"}),
    (2, {"parallel.tp": 2, "memory.recompute": ["attention", "feed_forward"]}),
]


def run_of(layout: dict[str, object]) -> RunConfig:
    return load_run("debug_tiny", FLOAT64 | layout)


def alone(layout: dict[str, object]) -> RunConfig:
    return run_of({key: value for key, value in layout.items() if key.startswith("model.")})


def some_rollouts(vocab: int, count: int = 6) -> list[Rollout]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for number in range(count):
        size = 5 + 3 * number % 11
        values = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3)]
        tokens = torch.randint(vocab, (size,), generator=generator)
        old = -values[1].abs() - 4.0
        made.append(Rollout(tokens, torch.arange(size) >= 2, values[0], old, old + 0.2 * values[2]))
    return made


def dp_part(rollouts: Sequence[Rollout], engine: Engine) -> list[Rollout]:
    dp = engine.groups["dp"]
    return list(rollouts[dp.index :: dp.size])


def gradients_of(engine: Engine, rollouts: Sequence[Rollout], **options: Any) -> dict[str, list[Any]]:
    """One step; each gradient that this rank is primary for, with the box of the global tensor that it is."""
    seen: dict[str, list[Any]] = {}
    run_step = pipeline_step.run_step

    def watched(local_model: Any, optimizer: Any, batches: Any, **more: Any) -> Any:
        def on_gradients(gradients: dict[str, Tensor]) -> None:
            for piece in local_model.pieces():
                if piece.is_primary:
                    seen[piece.name] = [
                        [[[part.start, part.stop] for part in box], values.flatten().tolist()]
                        for box, values in piece.by_box(gradients[piece.name])
                    ]

        return run_step(local_model, optimizer, batches, on_gradients=on_gradients, **more)

    module.run_step, before = watched, module.run_step  # type: ignore[assignment]
    try:
        result = engine.train_step(rollouts, **options)
    finally:
        module.run_step = before
    seen["loss"] = [[[], [result.loss]]]
    seen["grad_norm"] = [[[], [result.grad_norm]]]
    seen["metrics"] = [[[], [result.metrics[name] for name in sorted(result.metrics)]]]
    seen["tokens"] = [[[], [result.tokens]]]
    return seen


def assert_equal(found: list[dict[str, list[Any]]], whole: dict[str, Tensor], tolerance: float) -> None:
    elements = 0
    for rank in found:
        for name, parts in rank.items():
            for box, values in parts:
                expected = whole[name][tuple(slice(*part) for part in box)].flatten()
                largest = max(float(whole[name].abs().max()) if whole[name].numel() else 0.0, 1e-9)
                worst = float((torch.tensor(values, dtype=torch.float64) - expected).abs().max()) if values else 0.0
                assert worst <= tolerance * largest, (name, worst, largest)
                elements += len(values) if name in whole and box else 0
    assert elements == sum(tensor.numel() for tensor in whole.values() if tensor.dim()) - len(whole["metrics"]) - 3


def whole_of(found: dict[str, list[Any]]) -> dict[str, Tensor]:
    """Of one process: every parameter is there in one box."""
    made = {}
    for name, ((box, values),) in found.items():
        made[name] = torch.tensor(values, dtype=torch.float64).view([stop - start for start, stop in box] or [-1])
    return made


@pytest.mark.parametrize(("world", "layout"), slow_except(LAYOUTS, LAYOUTS[0], LAYOUTS[3]), ids=str)
def test_replayed_routing_gives_the_gradients_of_the_recorded_run(world: int, layout: dict[str, object]) -> None:
    """Recorded by another policy than the router's own, so that a router that chose by itself would be found out."""
    single, sharded = alone(layout), run_of(layout)
    assert single.model.moe is not None
    rollouts = some_rollouts(single.model.vocab_size)

    def recorded(rank: int) -> dict[str, Any]:
        other = replace(single, seed=single.seed + 1)
        experts = Engine(other).score(rollouts, record_experts=True).experts
        assert experts is not None
        given = [replace(rollout, experts=ids) for rollout, ids in zip(rollouts, experts, strict=True)]
        # The last token of each was not fed to the sampler: no record.
        for rollout in given:
            rollout.experts[-1] = -1  # type: ignore[index]
        engine = Engine(single)
        scored = engine.score(given, entropies=True, record_experts=True)
        assert (
            scored.entropies is not None
            and scored.experts is not None
            and all(
                torch.equal(a[:-1], b.experts[:-1])  # type: ignore[index]
                for a, b in zip(scored.experts, given, strict=True)
            )
        )
        live = gradients_of(Engine(single), rollouts, loss="grpo")
        return {
            "experts": [rollout.experts.tolist() for rollout in given],  # type: ignore[union-attr]
            "logprobs": [row.tolist() for row in scored.logprobs],
            "entropies": [row.tolist() for row in scored.entropies],
            "replayed": gradients_of(engine, given, loss="grpo", normalize="sequences"),
            "live": live,
        }

    (first,) = spawn_ranks(recorded, 1, seconds=200)
    given = [
        replace(rollout, experts=torch.tensor(ids)) for rollout, ids in zip(rollouts, first["experts"], strict=True)
    ]
    apart = [
        (a - b).abs().max() for a, b in zip(whole_of(first["replayed"]).values(), whole_of(first["live"]).values())
    ]
    assert max(apart) > 1e-3

    def work(rank: int) -> dict[str, Any]:
        engine = Engine(sharded, max_tokens=24)
        mine = dp_part(given, engine)
        scored = engine.score(mine, entropies=True, record_experts=True)
        assert scored.entropies is not None and scored.experts is not None
        own = range(len(given))[engine.groups["dp"].index :: engine.groups["dp"].size]
        for place, number in enumerate(own):
            for name, found in (("logprobs", scored.logprobs), ("entropies", scored.entropies)):
                expected = torch.tensor(first[name][number], dtype=torch.float64)
                torch.testing.assert_close(found[place], expected, rtol=0, atol=1e-9)
            recorded = given[number].experts
            assert recorded is not None and torch.equal(scored.experts[place][:-1], recorded[:-1])
        return gradients_of(engine, mine, loss="grpo", normalize="sequences")

    assert_equal(spawn_ranks(work, world, seconds=300), whole_of(first["replayed"]), 1e-9)


def test_logprobs_are_those_of_the_logits() -> None:
    """By `log_softmax` of logits written out, document by document, at a temperature."""
    run = alone({})
    rollouts = some_rollouts(run.model.vocab_size)
    engine = Engine(run, max_tokens=20)
    for temperature in (1.0, 0.7):
        found = engine.score(rollouts, temperature=temperature, entropies=True)
        assert found.entropies is not None
        for rollout, logprobs, entropies in zip(rollouts, found.logprobs, found.entropies, strict=True):
            size = rollout.tokens.shape[0]
            batch = whole_batch(rollout.tokens, rollout.tokens, (size,), step_labels=1, step_tokens=1)
            with torch.no_grad():
                logits = engine.local_model.model.logits(batch) / temperature
            expected = F.log_softmax(logits[:-1], -1).gather(1, rollout.tokens[1:, None])[:, 0]
            torch.testing.assert_close(logprobs[1:], expected, rtol=0, atol=1e-10)
            assert float(logprobs[0]) == 0.0
            expected = torch.distributions.Categorical(logits=logits[:-1]).entropy()
            torch.testing.assert_close(entropies[1:], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sharding", ["fsdp", "flat"])
def test_released_memory_is_given_back_and_comes_back(sharding: str) -> None:
    """Counted over all tensors that a rank makes, not over those that the engine knows of. Exchanges are gloo's: what
    ranks share is kept."""
    changes = {"parallel.ep": 2, "parallel.sharding": sharding, "model.num_layers": 2, "parallel.cpu_exchange": "gloo"}
    run = load_run("debug_small", changes)
    rollouts = some_rollouts(run.model.vocab_size)

    def live_storages() -> dict[int, torch.UntypedStorage]:
        gc.collect()
        live = [each for each in gc.get_objects() if isinstance(each, Tensor)]
        found = ((each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in live)
        return {storage._cdata: storage for storage in found}

    def work(rank: int) -> list[float]:
        # Whatever the process that forked this one had; held, so that no new storage has the address of one of these.
        inherited = live_storages()

        def live_bytes(engine: Engine) -> int:
            saved = [each.copy for kind in engine._released.values() for each in kind.saved if each.copy is not None]
            others = inherited.keys() | {copy.untyped_storage()._cdata for copy in saved}
            return sum(storage.nbytes() for key, storage in live_storages().items() if key not in others)

        engine = Engine(run)
        mine = dp_part(rollouts, engine)
        engine.train_step(mine, "ppo_clip")
        before = live_bytes(engine)
        given_back = engine.release()
        after = live_bytes(engine)
        with pytest.raises(MoefoldError, match="parameters, buffers are released"):
            engine.score(mine)
        engine.restore()
        released = engine.train_step(mine, "ppo_clip"), engine.score(mine).logprobs[0].tolist()
        other = Engine(run)
        other.train_step(mine, "ppo_clip")
        kept = other.train_step(mine, "ppo_clip"), other.score(mine).logprobs[0].tolist()
        assert released == kept, "to the last bit as without the release"
        assert engine.release(("optimizer",), drop=("optimizer",)) > before / 3 and not engine.optimizer.state
        return [before, after, given_back]

    for before, after, given_back in spawn_ranks(work, 2, seconds=200):
        assert before > 2_000_000
        assert after <= 0.05 * before and given_back >= 0.95 * before


@pytest.mark.parametrize("sharding", ["fsdp", "flat"])
def test_a_snapshot_is_scored_and_the_own_weights_come_back(sharding: str) -> None:
    run = load_run("debug_tiny", {"parallel.ep": 2, "parallel.sharding": sharding, "optim.lr": 1e-2})
    rollouts = some_rollouts(run.model.vocab_size)

    def work(rank: int) -> None:
        engine, other = Engine(run), Engine(run)
        mine = dp_part(rollouts, engine)
        first, streamed = engine.score(mine).logprobs, dict(engine.weights())
        specs = engine.weight_specs()
        assert specs == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in streamed.items()}
        assert list(specs) == list(streamed)
        reference = engine.snapshot()
        for each in (engine, other):
            each.train_step(mine, "ppo_clip")
        trained = engine.score(mine).logprobs
        assert not torch.equal(first[0], trained[0])
        with engine.using(reference):
            assert all(torch.equal(a, b) for a, b in zip(engine.score(mine).logprobs, first, strict=True))
            assert all(torch.equal(tensor, streamed[name]) for name, tensor in engine.weights())
            with pytest.raises(MoefoldError, match="are scored, not trained"):
                engine.train_step(mine, "ppo_clip")
        assert all(torch.equal(a, b) for a, b in zip(engine.score(mine).logprobs, trained, strict=True))
        steps = [each.train_step(mine, "ppo_clip") for each in (engine, other)]
        assert steps[0] == steps[1], "to the last bit as without the snapshot"

    spawn_ranks(work, 2, seconds=200)


def test_a_loss_of_ones_own_is_that_of_the_table() -> None:
    run = alone({})
    rollouts = some_rollouts(run.model.vocab_size)
    own = PolicyLoss((clipped_ratio,), ("advantages", "old_logprobs"))
    steps = [Engine(run).train_step(rollouts, loss, clip_low=0.1) for loss in ("ppo_clip", own)]
    assert steps[0] == steps[1]


def test_adapters_are_trained_beside_a_reference_policy_that_has_none(tmp_path: Path) -> None:
    """Over tensor and expert parallelism; PEFT computes the trained log-probs from the streamed adapters."""
    peft = pytest.importorskip("peft")
    theirs = saved_by_transformers(load_run("qwen3_30b_a3b_proxy"), tmp_path / "model")
    changes = {"precision.compute": "float32", "model.lora.rank": 4, "optim.trained": "adapters", "parallel.tp": 2}
    run = load_run("qwen3_30b_a3b_proxy", changes | {"parallel.ep": 2, "optim.lr": 1e-2})
    rollouts = some_rollouts(run.model.vocab_size)

    def work(rank: int) -> dict[str, list[list[float]]]:
        engine = Engine(run)
        engine.load_hf(tmp_path / "model")
        before = engine.score(rollouts).logprobs
        for _ in range(3):
            engine.train_step(rollouts, "policy_gradient")
        after = engine.score(rollouts).logprobs
        with engine.without_adapters():
            again = engine.score(rollouts).logprobs
        assert all(torch.equal(one, other) for one, other in zip(before, again, strict=True))
        adapters = {name: tensor.contiguous() for name, tensor in engine.weights(stream="adapters")}
        if rank == 0:
            (tmp_path / "adapters").mkdir()
            save_file(adapters, tmp_path / "adapters" / "adapter_model.safetensors")
            (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(engine.peft_config()))
        return {"before": [row.tolist() for row in before], "after": [row.tolist() for row in after]}

    found = spawn_ranks(work, 2, seconds=300)[0]
    adapted = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapters")).eval()
    moved = 0.0
    for rollout, before, after in zip(rollouts, found["before"], found["after"], strict=True):
        with torch.no_grad():
            logits = adapted(rollout.tokens[None]).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, rollout.tokens[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(after)[1:], expected, rtol=0, atol=1e-4)
        moved = max(moved, float((torch.tensor(after) - torch.tensor(before)).abs().max()))
    assert moved > 0.05


def test_problems_of_rollouts_are_said_at_once() -> None:
    run = alone({})
    engine = Engine(run, max_tokens=8)
    good = torch.arange(4)
    bad = [
        Rollout(torch.arange(9), torch.ones(9).bool()),
        Rollout(good + 10_000, torch.ones(3).bool(), advantages=torch.ones(4)),
        Rollout(good, torch.ones(4).bool(), torch.ones(4), experts=torch.zeros(4, 2, 2, dtype=torch.int64)),
        Rollout(good, torch.ones(4).bool(), torch.ones(4), experts=torch.zeros(4, 1, 2, dtype=torch.int64)),
    ]
    with pytest.raises(ConfigError) as error:
        engine.train_step(bad, "policy_gradient")
    for words in (
        "rollouts[0].tokens: 9 tokens are more than max_tokens 8; cut it, or set max_tokens to 9 at least",
        "rollouts[0].advantages: is missing",
        "rollouts[1].tokens: are not all within the vocabulary",
        "rollouts[1].counted: has shape (3,) for 4 tokens",
        "rollouts[2].experts: has the same expert twice",
        "rollouts[3].experts: has shape (4, 1, 2)",
    ):
        assert words in str(error.value)
    with pytest.raises(MoefoldError, match="nothing to train on"):
        engine.train_step([Rollout(good, torch.zeros(4).bool(), torch.ones(4))], "policy_gradient")


def test_packing_fills_microbatches_evenly() -> None:
    packed = pack([7, 3, 3, 2, 8, 1], 10)
    assert sorted(number for members in packed for number in members) == list(range(6))
    assert [sum((7, 3, 3, 2, 8, 1)[number] for number in members) for members in packed] == [8, 10, 6]


@pytest.mark.parametrize("name", moefold.rl.__all__)
def test_the_example_of_a_name_runs(name: str) -> None:
    found = getattr(moefold.rl, name)
    assert found.__doc__
    said: list[str] = []
    for example in doctest.DocTestFinder(recurse=False).find(found, name):
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert said == []
