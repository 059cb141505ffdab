"""moefold as a training engine of verl: `EngineRegistry` knows it as the backend "moefold" once this file is imported.

verl's workers call `BaseEngine`'s methods on every rank. Microbatches are cut by verl's own code, and its loss
functions get the log-probs of a microbatch as they would from any engine; what they return is the objective of our
step. verl multiplies a loss by the data-parallel size, because other engines average gradients; here gradients are
sums, so it is divided by it again. Recorded experts (`routed_experts`) are replayed.

A loss of verl's reads whole sequences. With context parallelism a rank has some of their tokens, so log-probs are
summed over cp into whole rows, every cp rank computes the whole loss, and the gradient reaches each log-prob on the
rank that it is from.

With LoRA (`lora_rank` of verl's model config) adapters alone are trained. As verl asks, weights come merged by HF name
(`lora.merge`), or adapters by PEFT name beside their config, after the weights without them.

Not supported, and refused: entropies in training, which have no gradient here. There are no multimodal inputs or deltas
of shards. Written for verl 0.9: `tests/ranks/test_verl_engine.py` calls every method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineConfig, HFModelConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from moefold.checkpoint.hf.hf_config import run_for
from moefold.checkpoint.hf.hf_directory import HfDirectory
from moefold.checkpoint.load import latest
from moefold.comm.collectives import all_reduce_ints, all_reduce_no_grad
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, MoefoldError, Problem
from moefold.model.decoder import DecoderOutput
from moefold.nn.batch import TokenObjective
from moefold.optim.lr_schedule import lr_at
from moefold.pipeline.step import StepGradients, compute_gradients, evaluate, not_finite, update
from moefold.precision.loss_scaling import factor_of
from moefold.rl.engine import Engine, collect_outputs, nothing
from moefold.rl.release_memory import KINDS, WEIGHTS, Kind
from moefold.rl.rollouts import Rollout, StepCounts
from moefold.schedule.names import schedule_named

# A loss of verl's: log-probs of a microbatch and its data to a loss and metrics.
Metrics = dict[str, object]
LossFunction = Callable[..., tuple[Tensor, Metrics]]
TokenLoss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@dataclass
class MoefoldEngineConfig(EngineConfig):
    """``overrides`` are keys of a run, as `moefold train` takes them: {"parallel.pp": 2}."""

    strategy: str = "moefold"
    overrides: dict[str, object] = field(default_factory=dict)


@EngineRegistry.register(model_type="language_model", backend="moefold", device=["cpu", "cuda"])
class MoefoldEngine(BaseEngine):
    """See the module."""

    engine: Engine

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: MoefoldEngineConfig,
        optimizer_config: object = None,
        checkpoint_config: object = None,
        **kwargs: object,
    ) -> None:
        super().__init__()
        self.model_config, self.engine_config, self.optimizer_config = model_config, engine_config, optimizer_config
        self.mode: str | None = None
        self._computed: StepGradients | None = None
        # The update that the lr is of.
        self._scheduled = 1

    # ---- start ----

    def initialize(self) -> None:
        path = Path(self.model_config.local_path or self.model_config.path)
        source = HfDirectory(path)
        source.close()
        keys = self._optimizer_keys() | self._adapter_keys() | self.engine_config.overrides
        run = override(run_for(source.config, "verl"), keys)
        device = self.engine_config.overrides.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        longest = self.engine_config.max_token_len_per_gpu or self.engine_config.infer_max_token_len_per_gpu
        self.engine = Engine(run, device=str(device), max_tokens=longest)
        self.engine.load_hf(path)
        self.offload()

    def _optimizer_keys(self) -> dict[str, object]:
        """verl's numbers under our names; what its config does not have stays as it is."""
        config, keys = self.optimizer_config, {"optim.lr": 0.0}
        names = {"lr": "lr", "weight_decay": "weight_decay", "clip_grad": "clip_norm"}
        found = {f"optim.{ours}": getattr(config, theirs, None) for theirs, ours in names.items()}
        betas = getattr(config, "betas", None)
        if betas is not None:
            found |= {"optim.beta1": betas[0], "optim.beta2": betas[1]}
        steps, warmup = getattr(config, "total_training_steps", -1), getattr(config, "lr_warmup_steps", -1)
        if steps > 0:
            share = getattr(config, "lr_warmup_steps_ratio", 0.0)
            kind = getattr(config, "lr_scheduler_type", None) or "constant"
            found |= {"optim.lr_schedule.warmup": warmup if (warmup or -1) > 0 else int(share * steps)}
            found |= {"optim.lr_schedule.kind": kind, "optim.lr_schedule.floor": getattr(config, "min_lr_ratio", None)}
            found["train.steps"] = steps
        return keys | {key: value for key, value in found.items() if value is not None}

    def _adapter_keys(self) -> dict[str, object]:
        """Of `lora_rank` and `lora_alpha`; which weights have adapters is said by our names, or verl's all-linear."""
        config, targets = self.model_config, "model.lora.targets"
        rank = getattr(config, "lora_rank", 0)
        if not rank:
            return {}
        named = getattr(config, "target_modules", "all-linear")
        if named != "all-linear" and targets not in self.engine_config.overrides:
            raise ConfigError(Problem("target_modules", f"{named}: is not read here", f"set {targets} in overrides"))
        if path := getattr(config, "lora_adapter_path", None):
            raise ConfigError(Problem("lora_adapter_path", f"{path}: adapters start anew here", "leave it out"))
        alpha = float(config.lora_alpha)
        return {"model.lora.rank": rank, "model.lora.alpha": alpha, "optim.trained": "adapters"}

    # ---- what it is ----

    @property
    def run(self) -> RunConfig:
        return self.engine.run

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload

    def get_data_parallel_size(self) -> int:
        return self.engine.groups["dp"].size

    def get_data_parallel_rank(self) -> int:
        return self.engine.groups["dp"].index

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """None for a group of one rank."""
        return self.engine.groups["dp"].handle

    def is_mp_src_rank_with_outputs(self) -> bool:
        """One of the ranks that share rollouts: the first of tp and cp of the pipeline rank that has the loss."""
        groups, parallel = self.engine.groups, self.run.parallel
        last = 0 if schedule_named(parallel.schedule).placement == "v" else groups["pp"].size - 1
        return groups["tp"].index == 0 and groups["cp"].index == 0 and groups["pp"].index == last

    # ---- modes and memory ----

    def train_mode(self, **kwargs: object) -> EngineMode:
        return EngineMode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: object) -> EngineMode:
        return EngineMode(self, "eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Give memory back ("cpu"), or take it again (any other device).

        Where the engine's device is a CPU there is no other memory, and nothing moves; modes release there too.
        """
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        asked = {"parameters": model, "buffers": model, "optimizer": optimizer, "gradients": grad}
        kinds = [cast(Kind, kind) for kind, wanted in asked.items() if wanted]
        if device != "cpu":
            self.engine.restore(kinds)
        elif self.engine.device.type != "cpu":
            self.engine.release(kinds)

    def offload(self, optimizer: bool = True) -> None:
        """Release what the config says is offloaded."""
        kinds: list[Kind] = ["parameters", "buffers", "gradients"] if self.is_param_offload_enabled else []
        kinds += ["optimizer"] if self.is_optimizer_offload_enabled and optimizer else []
        self.engine.release(kinds)

    # ---- steps ----

    def optimizer_zero_grad(self) -> None:
        self._computed = None

    def optimizer_step(self) -> float:
        """Clips and updates by the gradients of the last `forward_backward_batch`; returns their norm before that."""
        if self._computed is None:
            raise MoefoldError("optimizer_step without gradients: call forward_backward_batch first")
        engine, total = self.engine, max(self.run.train.steps, 1)
        engine.optimizer.set_lr(lr_at(min(self._scheduled, total), total, self.run.optim))
        result = update(engine.local_model, engine.optimizer, self._computed, not_finite)
        self._computed = None
        engine.after_update(float(result.grad_norm))
        return float(result.grad_norm)

    def lr_scheduler_step(self) -> float:
        """The lr of the next update."""
        self._scheduled += 1
        total = max(self.run.train.steps, 1)
        return lr_at(min(self._scheduled, total), total, self.run.optim)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, object]:
        self.engine.check_present(WEIGHTS if forward_only else KINDS)
        if loss_function is None and not forward_only:
            raise MoefoldError("a backward pass needs a loss function")
        wants_entropies = bool(tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False))
        if wants_entropies and not forward_only:
            raise MoefoldError("calculate_entropy: entropies have no gradient here; train with entropy_coeff 0")
        if not forward_only and self._computed is not None:
            raise MoefoldError("gradients of an earlier batch are waiting: call optimizer_step or optimizer_zero_grad")
        self._assign_counts(data)
        # Ranks with fewer microbatches run empty ones, so verl need not make the numbers equal.
        cut, indices = prepare_micro_batches(data, same_micro_num_in_dp=False)
        microbatches = [_rollouts(each) for each in cut]
        results: dict[int, tuple[float, Metrics]] = {}

        def objective(number: int, members: Sequence[Rollout]) -> TokenObjective:
            if number >= len(cut):
                return TokenObjective(_no_loss, {})
            loss: TokenLoss = nothing
            if loss_function is not None:
                loss = self._loss(cut[number], loss_function, lambda found: results.update({number: found}))
            # Cut like the tokens, it says which of them a context-parallel rank has.
            inputs = {"place": torch.arange(_size(members))}
            return TokenObjective(loss, inputs, _temperature(cut[number]), wants_entropies)

        batches = self.engine.batches(microbatches, objective, StepCounts(1, sum(map(_size, microbatches)), 1))
        found: dict[int, DecoderOutput] = {}
        collect = collect_outputs(found)
        local_model, optimizer = self.engine.local_model, self.engine.optimizer
        if forward_only:
            evaluate(local_model, batches, collect)
        else:
            scale = factor_of(self.engine.loss_scale)
            self._computed = compute_gradients(local_model, optimizer, batches, on_output=collect, loss_scale=scale)
        outputs = []
        # All ranks gather tokens, those without outputs too.
        for number, each in enumerate(cut):
            loss, metrics = results.get(number, (1.0, {}))
            output = found.get(number, DecoderOutput())
            values = {"log_probs": output.logprob_S} | ({"entropy": output.entropy_S} if wants_entropies else {})
            nested = {
                name: _jagged(self.engine.whole_tokens(batches[number], value), each) for name, value in values.items()
            }
            outputs.append({"model_output": detach_tree(nested), "loss": loss, "metrics": metrics})
        if not self.is_mp_src_rank_with_outputs():
            return {}
        result: dict[str, object] = postprocess_batch_func(output_lst=outputs, indices=indices, data=data)
        return result

    def _assign_counts(self, data: TensorDict) -> None:
        """What verl's losses and its code for microbatches read."""
        mine = int(data["loss_mask"].sum())
        (tokens,) = all_reduce_ints((mine,), self.engine.groups["dp"])
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens, dp_size=self.get_data_parallel_size())

    def _loss(
        self, microbatch: TensorDict, loss_function: LossFunction, seen: Callable[[tuple[float, Metrics]], None]
    ) -> TokenLoss:
        def loss(logprob_S: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
            output = {"log_probs": _jagged(self._whole(logprob_S, inputs["place"], microbatch), microbatch)}
            value, metrics = loss_function(
                model_output=output, data=microbatch, dp_group=self.get_data_parallel_group()
            )
            seen((float(value.detach()), metrics))
            return value / self.get_data_parallel_size()

        return loss

    def _whole(self, logprob_S: Tensor, place_S: Tensor, microbatch: TensorDict) -> Tensor:
        """Log-probs of the microbatch; those of other context-parallel ranks are numbers without a gradient."""
        cp = self.engine.groups["cp"]
        if cp.size == 1:
            return logprob_S
        own_T = logprob_S.new_zeros(microbatch["input_ids"].values().shape[0]).index_copy(0, place_S, logprob_S)
        return own_T + (all_reduce_no_grad(own_T.detach(), cp) - own_T.detach())

    # ---- weights and checkpoints ----

    def get_per_tensor_param(
        self, base_sync_done: bool = False, **kwargs: object
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, object] | None]:
        """(HF name, full tensor) on every rank, in bfloat16, but for biases of routers; and PEFT's config, if adapters
        are not merged: then these are adapters, or weights without them as long as the base was not sent."""
        self.engine.restore()
        if self.run.model.lora is None or (getattr(self.model_config, "lora", None) or {}).get("merge", False):
            return self.engine.weights(torch.bfloat16), None
        from peft import PeftType, TaskType

        stream = "adapters" if base_sync_done else "base"
        kinds = {"peft_type": PeftType.LORA, "task_type": TaskType.CAUSAL_LM}
        return self.engine.weights(torch.bfloat16, stream=stream), self.engine.peft_config() | kinds

    def disable_adapter(self) -> AbstractContextManager[None]:
        return self.engine.without_adapters()

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: object,
    ) -> None:
        self.engine.restore()
        self.engine.step = global_step
        self.engine.save(local_path)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: object
    ) -> None:
        """The newest below ``local_path``."""
        self.engine.restore()
        found = latest(Path(local_path), self.engine.groups["world"])
        if found is None:
            raise MoefoldError(f"{local_path}: there is no checkpoint")
        self.engine.load(found)
        self._scheduled = self.engine.step + 1


class EngineMode(BaseEngineCtx):
    """Takes back what the mode needs, and releases it after the with block if offloading is asked for.

    verl's own context names devices, and on a CPU both sides have the same name. Gradients that were not used are
    dropped.
    """

    engine: MoefoldEngine

    def __init__(self, engine: MoefoldEngine, mode: str, **kwargs: object) -> None:
        super().__init__(engine=engine, mode=mode, **kwargs)

    def __enter__(self) -> None:
        self.engine.mode = self.mode
        if not self.disable_auto_offload:
            self.engine.engine.restore(KINDS if self.mode == "train" else WEIGHTS)

    def __exit__(self, *error: object) -> None:
        if self.mode == "train":
            self.engine.optimizer_zero_grad()
        if not self.disable_auto_offload:
            self.engine.offload(optimizer=self.mode == "train")
        self.engine.mode = None


def _rollouts(microbatch: TensorDict) -> list[Rollout]:
    """One per sequence; which tokens count is the loss function's business."""
    rows = microbatch["input_ids"].unbind()
    experts = microbatch.get("routed_experts", None)
    recorded: Sequence[Tensor | None] = [None] * len(rows) if experts is None else experts.unbind()
    return [
        Rollout(row.cpu(), torch.ones_like(row, dtype=torch.bool).cpu(), experts=ids)
        for row, ids in zip(rows, recorded, strict=True)
    ]


def _size(rollouts: Sequence[Rollout]) -> int:
    return sum(rollout.tokens.shape[0] for rollout in rollouts)


def _jagged(values: Tensor, microbatch: TensorDict) -> Tensor:
    found: Tensor = torch.nested.nested_tensor_from_jagged(values, microbatch["input_ids"].offsets().to(values.device))
    return found


def _temperature(microbatch: TensorDict) -> float:
    found = microbatch.get("temperature", 1.0)
    values = torch.as_tensor(getattr(found, "data", found)).flatten()
    if not bool((values == values[0]).all()):
        raise MoefoldError(f"temperature: one for all sequences of a microbatch, not {values.tolist()}")
    return float(values[0])


def _no_loss(logprob_S: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Of an empty microbatch; in the graph, so that all ranks have the same backward."""
    return (logprob_S * 0.0).sum()
