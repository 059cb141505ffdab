"""The adapter for verl: every method of its `BaseEngine` is called, with its own losses and its own microbatches.

Skipped where verl is not installed; it pins other versions than this project's tests use, so it has an environment of
its own: `pip install verl==0.9.1` beside moefold, then `VERL_ENGINE_DEVICE=cpu pytest tests/ranks/test_verl_engine.py`.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("VERL_ENGINE_DEVICE", "cpu")
pytest.importorskip("verl")

from peft import LoraConfig
from tensordict import TensorDict
from tests.checkpoint.hf_sources import saved_by_transformers, tensors_in
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, OptimizerConfig, PolicyLossConfig
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.utils.losses import ppo_loss, sft_loss

from moefold.comm.spawn import spawn_ranks
from moefold.errors import MoefoldError
from moefold.recipes.catalog import RECIPES
from moefold.rl.verl_engine import MoefoldEngine, MoefoldEngineConfig

LAYOUTS: list[tuple[int, dict[str, object]]] = [
    (1, {}),
    (2, {"parallel.ep": 2}),
    (4, {"parallel.pp": 2, "parallel.tp": 2, "parallel.ep": 2}),
    (4, {"parallel.pp": 2, "parallel.cp": 2, "parallel.ep": 2}),
    (4, {"parallel.tp": 2, "parallel.cp": 2, "parallel.ep": 4}),
]
LENGTHS = ((3, 5), (2, 4), (4, 6), (2, 7))


class HfModel:
    """What the adapter reads of verl's HFModelConfig, whose constructor wants a tokenizer."""

    def __init__(self, path: Path, lora_rank: int = 0, merge: bool = False, target_modules: Any = "all-linear") -> None:
        self.path = self.local_path = str(path)
        self.lora_rank, self.lora_alpha, self.target_modules = lora_rank, 8, target_modules
        self.lora = {"merge": merge}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("verl") / "model"
    saved_by_transformers(RECIPES["qwen3_30b_a3b_proxy"](), path)
    return path


def engine_of(path: Path | HfModel, overrides: dict[str, object], **options: Any) -> BaseEngine:
    config = MoefoldEngineConfig(
        max_token_len_per_gpu=64, overrides={"precision.compute": "float32"} | overrides, **options
    )
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0, clip_grad=1.0, total_training_steps=10)
    engine: BaseEngine = EngineRegistry.new(
        model_type="language_model",
        backend="moefold",
        model_config=path if isinstance(path, HfModel) else HfModel(path),
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=None,
    )
    engine.initialize()
    return engine


def rows() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(256, (a + b,), generator=generator), a) for a, b in LENGTHS]


def data_of(engine: BaseEngine, old: list[Tensor] | None = None) -> TensorDict:
    """This data-parallel rank's sequences as verl's workers pass them: nested, without padding."""
    size, index = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    mine = rows()[index::size]

    def nested(parts: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    masks = [(torch.arange(len(row)) >= prompt).long() for row, prompt in mine]
    answers = [torch.ones(len(row) - prompt) for row, prompt in mine]
    olds = [x - 0.05 for x in answers] if old is None else old[index::size]
    data = TensorDict(
        {
            "input_ids": nested([row for row, _ in mine]),
            "position_ids": nested([torch.arange(len(row)) for row, _ in mine]),
            "loss_mask": nested(masks),
            "prompts": nested([row[:prompt] for row, prompt in mine]),
            "responses": nested([row[prompt:] for row, prompt in mine]),
            "response_mask": nested([answer.long() for answer in answers]),
            "old_log_probs": nested(olds),
            "advantages": nested([answer * (n - 1.5) for n, answer in enumerate(answers)]),
        },
        batch_size=[len(mine)],
    )
    tu.assign_non_tensor(
        data, use_dynamic_bsz=True, max_token_len_per_gpu=24, temperature=1.0, global_batch_size=len(LENGTHS)
    )
    return data


def by_transformers(path: Path) -> tuple[float, float, dict[str, list[float]]]:
    """The loss per answer token, the norm of its gradient, and log-probs, from transformers and autograd alone."""
    from tests.checkpoint.hf_sources import loaded_by_transformers

    theirs = loaded_by_transformers(path)
    total, count, logprobs = torch.zeros(()), 0, {}
    for number, (row, prompt) in enumerate(rows()):
        logits = theirs(row[None]).logits[0, :-1].log_softmax(-1)
        found = logits.gather(1, row[1:, None])[:, 0]
        logprobs[str(number)] = found.detach().tolist()
        total, count = total - found[prompt - 1 :].sum(), count + len(row) - prompt
    (total / count).backward()
    norm = sum(float(p.grad.double().square().sum()) for p in theirs.parameters() if p.grad is not None) ** 0.5
    return float(total.detach() / count), norm, logprobs


@pytest.mark.parametrize(("world", "overrides"), LAYOUTS, ids=str)
def test_every_method_of_the_contract(world: int, overrides: dict[str, object], model: Path, tmp_path: Path) -> None:
    """The first loss and gradient norm are those of transformers, as verl asks of a new engine."""
    loss, norm, logprobs = by_transformers(model)
    weights = tensors_in(model)

    def work(rank: int) -> list[float]:
        engine = engine_of(model, overrides)
        assert isinstance(engine, MoefoldEngine) and not engine.is_param_offload_enabled
        assert not engine.is_optimizer_offload_enabled
        assert (engine.get_data_parallel_group() is None) == (engine.get_data_parallel_size() == 1)
        with engine.eval_mode():
            data = data_of(engine)
            tu.assign_non_tensor(data, calculate_entropy=True)
            output = engine.infer_batch(data)
        if engine.is_mp_src_rank_with_outputs():
            assert all(bool((each > 0).all()) for each in output["model_output"]["entropy"].unbind())
            for number, found in enumerate(output["model_output"]["log_probs"].unbind()):
                place = engine.get_data_parallel_rank() + number * engine.get_data_parallel_size()
                torch.testing.assert_close(found[:-1], torch.tensor(logprobs[str(place)]), rtol=0, atol=2e-4)
        stream, peft = engine.get_per_tensor_param()
        seen = {name: tensor for name, tensor in stream}
        assert peft is None and seen.keys() == weights.keys()
        assert all(torch.equal(seen[name], weights[name].to(torch.bfloat16)) for name in weights)

        found, norms, rates = [], [], []
        with engine.train_mode():
            for _ in range(3):
                output = engine.train_batch(data_of(engine), partial(sft_loss, None))
                rates.append(engine.lr_scheduler_step())
                if engine.is_mp_src_rank_with_outputs():
                    found.append(sum(output["loss"]))
                    norms.append(output["metrics"]["grad_norm"])
        assert rates == [1e-2] * 3
        engine.save_checkpoint(str(tmp_path / "saved"), global_step=3)
        before = dict(engine.get_per_tensor_param()[0])
        with engine.train_mode():
            engine.train_batch(data_of(engine), partial(sft_loss, None))
        engine.load_checkpoint(str(tmp_path / "saved"))
        after = dict(engine.get_per_tensor_param()[0])
        assert all(torch.equal(before[name], after[name]) for name in before)
        engine.to("cpu", model=True, optimizer=True, grad=True)
        with engine.disable_adapter(), pytest.raises(MoefoldError, match="without gradients"):
            engine.optimizer_step()
        return [*found, *norms]

    results = [each for each in spawn_ranks(work, world, seconds=500) if each]
    firsts = [each[0] for each in results]
    # Every rank's loss is multiplied by the data-parallel size, and is of its own tokens.
    assert sum(firsts) / len(firsts) == pytest.approx(loss, rel=1e-4)
    for each in results:
        assert each[3] == pytest.approx(norm, rel=1e-3)
    last = [each[2] for each in results]
    assert sum(last) / len(last) < loss


def test_ppo_of_verl_and_offload(model: Path) -> None:
    """verl's own PPO loss: at equal log-probs the ratio is 1; memory is released between the modes."""

    def work(rank: int) -> dict[str, float]:
        engine = engine_of(model, {}, param_offload=True, optimizer_offload=True)
        assert isinstance(engine, MoefoldEngine)
        assert engine.engine.released_bytes > 0
        with engine.eval_mode():
            output = engine.infer_batch(data_of(engine))
        answers = [
            found[prompt - 1 : -1]
            for found, (_, prompt) in zip(output["model_output"]["log_probs"].unbind(), rows(), strict=True)
        ]
        config = ActorConfig(
            strategy="moefold", rollout_n=1, ppo_micro_batch_size_per_gpu=4, policy_loss=PolicyLossConfig()
        )
        with engine.train_mode():
            first = engine.train_batch(data_of(engine, answers), partial(ppo_loss, config))
            second = engine.train_batch(data_of(engine, answers), partial(ppo_loss, config))
        assert engine.engine.released_bytes > 0
        kl = [float(out["metrics"]["actor/ppo_kl"].aggregate()) for out in (first, second)]
        return {"first": kl[0], "second": kl[1], "loss": sum(first["loss"]) - sum(second["loss"])}

    (found,) = spawn_ranks(work, 1, seconds=300)
    assert abs(found["first"]) < 1e-5 < abs(found["second"]) and found["loss"] > 0


def test_adapters_by_peft_name_or_merged(model: Path) -> None:
    weights = tensors_in(model)

    def work(rank: int) -> list[float]:
        engine = engine_of(HfModel(model, lora_rank=4), {"parallel.tp": 2, "parallel.ep": 2})
        with engine.eval_mode():
            before = engine.infer_batch(data_of(engine))
        with engine.train_mode():
            for _ in range(2):
                engine.train_batch(data_of(engine), partial(sft_loss, None))
        with engine.eval_mode(), engine.disable_adapter():
            again = engine.infer_batch(data_of(engine))
        if engine.is_mp_src_rank_with_outputs():
            one, other = (out["model_output"]["log_probs"].values() for out in (before, again))
            assert torch.equal(one, other)
        base, config = engine.get_per_tensor_param(base_sync_done=False)
        assert config is not None and all(torch.equal(value, weights[name].bfloat16()) for name, value in base)
        stream, config = engine.get_per_tensor_param(base_sync_done=True)
        adapters = dict(stream)
        assert isinstance(config, dict) and LoraConfig(**config).r == 4 and config["lora_alpha"] == 8.0
        engine.model_config.lora["merge"] = True
        stream, config = engine.get_per_tensor_param(base_sync_done=True)
        merged, name = dict(stream), "model.layers.0.self_attn.q_proj"
        assert config is None and merged.keys() == weights.keys()
        a, b = (adapters[f"base_model.model.{name}.lora_{kind}.weight"].float() for kind in "AB")
        apart = merged[f"{name}.weight"].float() - (weights[f"{name}.weight"] + 2 * b @ a)
        return [float(apart.abs().max()), float((2 * b @ a).abs().max())]

    for apart, change in spawn_ranks(work, 2, seconds=300):
        assert apart < 0.005 < 0.01 < change

    with pytest.raises(MoefoldError, match="in overrides"):
        engine_of(HfModel(model, 4, target_modules=["q_proj"]), {})


def test_a_method_that_the_adapter_lacks_is_noticed() -> None:
    """Of `BaseEngine`'s methods only deltas of shards are not there."""
    inherited = {
        name
        for name, value in vars(BaseEngine).items()
        if not name.startswith("_") and callable(value) and getattr(MoefoldEngine, name) is value
    }
    assert inherited == {
        "train_batch",
        "infer_batch",
        "get_per_tensor_param_shard",
        "get_per_tensor_param_delta_shard",
        "prime_delta_snapshots",
    }
