"""The engine that a framework for reinforcement learning drives: log-probs, training steps, weights out, memory back.

Every rank of the run calls the same methods in the same order. Rollouts are those of the rank's data-parallel group:
ranks that differ in tp, cp or pp only pass the same ones. A step is the trainer's own (`pipeline.step.run_step`) with
another objective, so every layout and schedule that trains also does this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.checkpoint.hf.gather_weights import DEFAULT_BUCKET, WeightBucket, bucket_plan, hf_weights, weight_buckets
from moefold.checkpoint.hf.hf_config import family_of, write_config
from moefold.checkpoint.hf.hf_directory import HfDirectory
from moefold.checkpoint.hf.peft_adapters import peft_config
from moefold.checkpoint.load import load_into
from moefold.checkpoint.lora_weights import WithAdapters
from moefold.checkpoint.save import Saver
from moefold.checkpoint.state_dict import (
    NeededTensor,
    chunks_of,
    copy_into_live,
    needed_tensors,
    run_record,
    tensors_elsewhere,
)
from moefold.checkpoint.step_dirs import final_path
from moefold.checkpoint.tensor_spec import TensorSource, TensorSpec
from moefold.checks.run_all import problems
from moefold.comm.collectives import all_gather_no_grad, all_reduce_max, all_reduce_no_grad
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, MoefoldError
from moefold.model.decoder import DecoderOutput
from moefold.nn.batch import Batch, TokenObjective, context_shard, move_batch
from moefold.nn.low_rank import adapters_off
from moefold.parallel.parallelize import build_local_model, groups_of, init_main_weights
from moefold.parallel.router_replay import RoutingRecorder, replay_routing_of_batches
from moefold.pipeline.pipeline_state import OnOutput
from moefold.pipeline.step import count_over_step, evaluate, make_optimizer, not_finite, run_step
from moefold.precision import loss_scaling
from moefold.precision.dtypes import TORCH_FORMATS
from moefold.rl.policy_losses import Inputs, PolicyLoss, loss_named, normalization_named, ratio_metrics
from moefold.rl.release_memory import KINDS, WEIGHTS, Kind, Released, Snapshot, release, take_snapshot
from moefold.rl.rollouts import (
    Rollout,
    ScoredRollouts,
    StepCounts,
    TrainedStep,
    check_rollouts,
    local_counts,
    loss_inputs,
    microbatch,
    pack,
    per_rollout,
    to_back,
)
from moefold.schedule.names import schedule_named

# From the number and the rollouts of a microbatch.
MakeObjective = Callable[[int, Sequence[Rollout]], TokenObjective]


class Engine:
    """One rank's part of a model that is trained on rollouts; see the module for who calls what.

    ``run`` says model, layout, precision and optimizer; its data and steps are not read. Without a process group the
    world is this process. ``max_tokens`` bounds a microbatch; it is `data.seq_len` times `data.micro_batch` unless
    given.

    >>> import torch, moefold
    >>> from moefold.rl import Engine, Rollout
    >>> engine = Engine(moefold.load_run("debug_tiny"))
    >>> rollout = Rollout(torch.arange(6), torch.tensor([0, 0, 1, 1, 1, 1]).bool(), advantages=torch.ones(6))
    >>> before = engine.score([rollout]).logprobs[0].sum()
    >>> engine.train_step([rollout], "policy_gradient").tokens
    4
    >>> bool(engine.score([rollout]).logprobs[0].sum() > before)
    True
    """

    def __init__(
        self,
        run: RunConfig,
        *,
        device: torch.device | str = "cpu",
        max_tokens: int | None = None,
        seconds: float = 600.0,
    ) -> None:
        connected = dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if connected else (0, 1)
        # Sizes of the trainer's own batches do not matter here.
        found = [problem for problem in problems(run, world) if not problem.path.startswith(("data.", "train."))]
        if found:
            raise ConfigError(*found)
        self.run, self.device = run, torch.device(device)
        self.max_tokens = run.data.seq_len * run.data.micro_batch if max_tokens is None else max_tokens
        self.groups = groups_of(run, world, rank, timedelta(seconds=seconds))
        self.local_model = build_local_model(run, self.groups, self.device)
        self.optimizer = make_optimizer(self.local_model)
        init_main_weights(self.local_model, self.optimizer)
        self.recorder = None
        if run.model.moe is not None:
            replay_routing_of_batches(self.local_model)
            self.recorder = RoutingRecorder(self.local_model)
        self.step = 0
        self.loss_scale = loss_scaling.resumed_loss_scale(run.precision.loss_scaling, None)
        self._released: dict[Kind, Released] = {}
        # Whether the weights of a snapshot are in the place of its own.
        self._lent = False

    # ---- batches ----

    def score(
        self,
        rollouts: Sequence[Rollout],
        *,
        temperature: float = 1.0,
        entropies: bool = False,
        record_experts: bool = False,
    ) -> ScoredRollouts:
        """Log-probs of all tokens under the current weights; on request, entropies of the distributions that tokens
        come from, and the experts of all tokens."""
        self.check_present(WEIGHTS)
        check_rollouts(rollouts, (), self.run, self.max_tokens)
        objective = TokenObjective(nothing, {}, temperature, entropies)
        packed, batches = self._packed(rollouts, lambda number, members: objective, StepCounts(1, 1, 1))
        recorder = self.recorder if record_experts else None
        if recorder is not None:
            recorder.start_recording(batches)
        found: dict[int, DecoderOutput] = {}
        evaluate(self.local_model, batches, collect_outputs(found))
        outputs = [found.get(number, DecoderOutput()) for number in range(len(batches))]

        def of_rollouts(values: Sequence[Tensor | None]) -> list[Tensor]:
            whole = [self.whole_tokens(batch, value) for batch, value in zip(batches, values, strict=True)]
            return [to_back(each) for each in per_rollout(rollouts, packed, whole)]

        return ScoredRollouts(
            of_rollouts([output.logprob_S for output in outputs]),
            of_rollouts([output.entropy_S for output in outputs]) if entropies else None,
            None if recorder is None else per_rollout(rollouts, packed, recorder.take_recorded(batches)),
        )

    def train_step(
        self,
        rollouts: Sequence[Rollout],
        loss: str | PolicyLoss = "grpo",
        *,
        normalize: str = "tokens",
        lr: float | None = None,
        temperature: float = 1.0,
        **numbers: float,
    ) -> TrainedStep:
        """One update by all ranks' rollouts. ``loss`` and ``normalize`` name rows of `policy_losses.LOSSES` and
        `policy_losses.NORMALIZATIONS`; ``numbers`` are the loss's own (clip_low, clip_high, kl_weight). A loss that is
        not in the table is given as a `PolicyLoss`."""
        self.check_present()
        if self._lent:
            raise MoefoldError("train_step inside of using(): weights of a snapshot are scored, not trained")
        policy, normalization = loss_named(loss, numbers), normalization_named(normalize)
        check_rollouts(rollouts, policy.reads, self.run, self.max_tokens)
        mine = local_counts(rollouts if self.groups["cp"].index == 0 else (), normalization)
        counts = StepCounts(*count_over_step(mine, self.groups))
        if counts.divisor == 0:
            raise MoefoldError("no rollout of this step has a counted token: there is nothing to train on")
        dtype = torch.promote_types(TORCH_FORMATS[self.run.precision.compute], torch.float32)

        def objective(number: int, members: Sequence[Rollout]) -> TokenObjective:
            return TokenObjective(policy, loss_inputs(members, policy.reads, normalization, dtype), temperature)

        _, batches = self._packed(rollouts, objective, counts)
        sums: dict[str, Tensor] = {}

        def on_output(number: int, output: DecoderOutput) -> None:
            if output.logprob_S is not None:
                inputs = batches[number].objective.inputs  # type: ignore[union-attr]
                for name, value in ratio_metrics(output.logprob_S, inputs, policy).items():
                    sums[name] = sums.get(name, torch.zeros_like(value)) + value

        self.optimizer.set_lr(self.run.optim.lr if lr is None else lr)
        local, scale = self.local_model, loss_scaling.factor_of(self.loss_scale)
        result = run_step(local, self.optimizer, batches, skip_reason=not_finite, on_output=on_output, loss_scale=scale)
        self.after_update(float(result.grad_norm))
        total = self._summed(sums)
        tokens = total.pop("tokens")
        metrics = {name: value / max(tokens, 1) for name, value in total.items() if "old_logprobs" in policy.reads}
        mean, norm = float(result.sums.loss), float(result.grad_norm)
        return TrainedStep(mean, norm, round(tokens), metrics, result.skipped, scale)

    def after_update(self, grad_norm: float) -> None:
        """The next step; an update with a ``grad_norm`` that is not finite was skipped."""
        self.loss_scale = loss_scaling.loss_scale_after_norm(
            self.loss_scale, self.run.precision.loss_scaling, grad_norm
        )
        self.step += 1

    def _packed(
        self, rollouts: Sequence[Rollout], objective: MakeObjective, counts: StepCounts
    ) -> tuple[list[list[int]], list[Batch]]:
        """Numbers of rollouts per microbatch, and this rank's share of each microbatch."""
        packed = pack([rollout.tokens.shape[0] for rollout in rollouts], self.max_tokens)
        batches = self.batches([[rollouts[number] for number in numbers] for numbers in packed], objective, counts)
        return packed + [[] for _ in range(len(batches) - len(packed))], batches

    def batches(
        self, microbatches: Sequence[Sequence[Rollout]], objective: MakeObjective, counts: StepCounts
    ) -> list[Batch]:
        """This rank's share of each microbatch, and empty ones up to the number that all ranks run."""
        batches = []
        for number in range(self._num_microbatches(len(microbatches))):
            members = microbatches[number] if number < len(microbatches) else ()
            batch = microbatch(members, self.run, objective(number, members), counts)
            shard = context_shard(batch, self.groups["cp"].index)
            batches.append(move_batch(shard, lambda tensor: tensor.to(self.device)))
        return batches

    def _num_microbatches(self, mine: int) -> int:
        """The same on all ranks, and enough for the schedule."""
        most = int(all_reduce_max(torch.tensor([mine], device=self.device), self.groups["world"])[0])
        parallel = self.run.parallel
        fewest = schedule_named(parallel.schedule).microbatches_per_stage * parallel.pp * parallel.vpp
        return max(most, fewest, 1)

    def whole_tokens(self, batch: Batch, logprob_S: Tensor | None) -> Tensor:
        """[T] from the context-parallel ranks of the last stage, on all ranks that share the microbatch."""
        dtype = torch.promote_types(TORCH_FORMATS[self.run.precision.compute], torch.float32)
        mine_S = torch.zeros(batch.num_tokens, dtype=dtype, device=self.device) if logprob_S is None else logprob_S
        mine_S = all_reduce_no_grad(mine_S, self.groups["pp"])
        if batch.context_size == 1:
            return mine_S
        gathered_T = all_gather_no_grad(mine_S, batch.held_sizes, self.groups["cp"])
        return torch.empty_like(gathered_T).index_copy_(0, batch.order_T, gathered_T)

    def _summed(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Over dp, cp and pp; the ranks of a tp group have the same tokens."""
        names = ("tokens", "clipped", "kl", "ratio")
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.stack([sums.get(name, zero) for name in names])
        for axis in ("dp", "cp", "pp"):
            total = all_reduce_no_grad(total, self.groups[axis])
        return dict(zip(names, total.tolist(), strict=True))

    # ---- weights ----

    def weights(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = DEFAULT_BUCKET, stream: str = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) of all weights on every rank; every rank must run it to the end.

        Of a model with adapters, ``stream`` names a row of `gather_weights.STREAMS`: weights with adapters merged into
        them, "base" weights without them, or "adapters" alone, by PEFT's names.
        """
        self.check_present(WEIGHTS)
        return hf_weights(self.local_model, dtype, bucket_bytes, stream)

    def weight_buckets(
        self,
        bucket_bytes: int = DEFAULT_BUCKET,
        dtype: torch.dtype | None = None,
        to: int | None = None,
        stream: str = "merged",
    ) -> Iterator[WeightBucket]:
        """The same in buckets, for `weight_transport.send_weights`; with ``to``, on that rank only."""
        self.check_present(WEIGHTS)
        return weight_buckets(self.local_model, bucket_bytes, dtype, to, stream)

    def weight_specs(
        self, dtype: torch.dtype | None = None, stream: str = "merged"
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of what `weights` yields, by name and in its order; no communication."""
        main = self.local_model.sharding.main_dtype
        plan = bucket_plan(self.run.model, main, DEFAULT_BUCKET, dtype, stream)
        return {part.hf_name: (part.dtype, part.hf_shape) for bucket in plan for part in bucket}

    def snapshot(self) -> Snapshot:
        """A copy of this rank's weights on the host: a reference policy, say."""
        self.check_present(WEIGHTS)
        return take_snapshot(self.local_model, self.optimizer)

    @contextmanager
    def using(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, `score` and `weights` are of the snapshot; then the engine's own weights are back, to the bit."""
        self.check_present(WEIGHTS)
        with snapshot.in_place(self.local_model.model):
            self._lent = True
            try:
                yield
            finally:
                self._lent = False

    def hf_config(self, context: int) -> dict[str, object]:
        """A config.json that transformers reads as this model, for sequences of at most ``context`` tokens."""
        dtype, model = str(self.local_model.sharding.main_dtype), replace(self.run.model, lora=None)
        return write_config(model, family_of(model), context, dtype.removeprefix("torch."))

    def peft_config(self, base_name: str | None = None) -> dict[str, object]:
        """adapter_config.json of what ``stream="adapters"`` sends; ``base_name``: where the weights are."""
        if self.run.model.lora is None:
            raise MoefoldError("model.lora is null: this model has no adapters")
        return peft_config(self.run.model, base_name)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside, the model computes as if it had no adapters: a reference policy that takes no memory."""
        return adapters_off(self.local_model.model)

    def load_hf(self, directory: Path | str) -> None:
        """Weights of a Hugging Face directory, of which each rank reads what it holds; optimizer states are reset.

        Adapters, where the model has any, start anew: their B is zero.
        """
        self.check_present()
        stored = HfDirectory(Path(directory), self.local_model.sharding.main_dtype)
        source = stored if self.run.model.lora is None else WithAdapters(stored, self.run)
        try:
            offered = {name: TensorSpec(source.dtype(name), source.shape(name)) for name in source.names()}
            wanted = needed_tensors(self.local_model, self.optimizer, offered)
            values = {want.name: _read(source, want).to(self.device) for want in wanted}
        finally:
            stored.close()
        copy_into_live(self.local_model, self.optimizer, values)

    def save(self, directory: Path | str) -> Path:
        """A checkpoint of weights, optimizer states and the number of the step, below ``directory``."""
        self.check_present()
        root = Path(directory)
        saver = Saver(
            root, self.groups["world"], 0, background=False, about=run_record(self.local_model), device=self.device
        )
        chunks = chunks_of(self.local_model, self.optimizer)
        state = {"rl_step": self.step} | loss_scaling.loss_scale_to_json(self.loss_scale)
        saver.begin(self.step, chunks, state, tensors_elsewhere(self.local_model, self.optimizer))
        saver.finish()
        return final_path(root, self.step)

    def load(self, path: Path | str) -> None:
        """A checkpoint that any layout wrote, with its optimizer states if it has them."""
        self.check_present()
        state = load_into(Path(path), self.local_model, self.optimizer)
        self.step = int(state.get("rl_step", 0))
        saved = loss_scaling.loss_scale_from_json(state.get("loss_scale"))
        self.loss_scale = loss_scaling.resumed_loss_scale(self.run.precision.loss_scaling, saved)

    # ---- memory ----

    def release(self, kinds: Sequence[Kind] = KINDS, *, drop: Sequence[Kind] = ()) -> int:
        """Give memory back; returns how many bytes of the device. Kinds in ``drop`` are not copied to the host:
        optimizer states only, which then start anew."""
        if unknown := [kind for kind in drop if kind not in ("optimizer", "gradients")]:
            raise MoefoldError(f"{', '.join(unknown)} cannot be dropped: nothing could restore them")
        before = self.released_bytes
        for kind in kinds:
            if kind not in self._released:
                self._released[kind] = release(self.local_model, self.optimizer, kind, drop=kind in drop)
        return self.released_bytes - before

    def restore(self, kinds: Sequence[Kind] = KINDS) -> None:
        """Take back what was released of these kinds."""
        for kind in kinds:
            if kind in self._released:
                self._released.pop(kind).restore()

    @property
    def released_bytes(self) -> int:
        """Of the device, given back now."""
        return sum(each.nbytes for each in self._released.values())

    def check_present(self, kinds: Sequence[Kind] = KINDS) -> None:
        """Raises if something of these kinds is released."""
        if missing := [kind for kind in self._released if kind in kinds]:
            raise MoefoldError(f"{', '.join(missing)} are released: call restore() first")


def nothing(logprob_S: Tensor, inputs: Inputs) -> Tensor:
    """The objective where only log-probs are wanted."""
    return logprob_S.new_zeros(())


def collect_outputs(found: dict[int, DecoderOutput]) -> OnOutput:
    """Puts the last stage's output of each microbatch into ``found``."""

    def on_output(number: int, output: DecoderOutput) -> None:
        if output.logprob_S is not None:
            found[number] = output

    return on_output


def _read(source: TensorSource, want: NeededTensor) -> Tensor:
    parts = [source.read(want.name, box).flatten() for box in want.boxes]
    return torch.cat(parts).view(want.sizes)
