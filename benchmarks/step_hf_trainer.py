"""Hugging Face's Trainer on transformers' own model of the same shape, from the same initial parameters.

It is the real loop, `Trainer.train`, in a thread of its own. A callback blocks it at the beginning of every step and
`run` lets one step pass: a run lasts from one beginning to the next, with everything that the loop does in between.
Logging, saving and evaluation are off. The model computes no balance loss, which is its default.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from benchmarks.runner import Builder, Options
from benchmarks.step_by_hand import initial_parameters, run_of
from benchmarks.timed_layer import saved_for_backward
from moefold.bench.step_bench import step_tokens
from moefold.config.attention import GQAConfig
from moefold.config.run import RunConfig

# More steps than any comparison makes.
_MAX_STEPS = 1_000_000


def trainer(implementation: str) -> Builder:
    """``implementation`` of the experts: "eager" loops over them, "grouped_mm" is torch's grouped matmul."""
    return partial(TrainerStep, implementation)


class TrainerStep:
    def __init__(self, implementation: str, options: Options) -> None:
        library = import_module("transformers")
        self.run_config = run_of(options)
        self.model = _model(library, self.run_config, implementation)
        self.gate, self.samples = _Gate(), _Samples(self.run_config)
        self.directory = tempfile.TemporaryDirectory(prefix="moefold-trainer-")
        callback = type("Wait", (library.TrainerCallback,), {"on_step_begin": lambda *_, **__: self.gate.wait()})
        self.trainer = library.Trainer(
            model=self.model,
            args=_arguments(library, self.run_config, self.directory.name),
            train_dataset=self.samples,
            callbacks=[callback()],
        )
        threading.Thread(target=self._train, args=(options["threads"],), daemon=True).start()
        self.gate.until_waiting()

    def _train(self, threads: int) -> None:
        # The number of compute threads is a setting per thread.
        torch.set_num_threads(threads)
        try:
            self.trainer.train()
        except BaseException as error:
            self.gate.fail(error)

    def prepare(self, seed: int) -> None:
        """The loop prefetches one batch, so these are the tokens of the step after the next."""
        self.samples.seed = seed

    def run(self, prepared: None) -> None:
        self.gate.let_one_pass()

    def saved_bytes(self, prepared: None) -> int:
        inputs = _inputs(step_tokens(self.run_config, self.samples.seed)[0])

        def forward() -> Tensor:
            with self.trainer.compute_loss_context_manager():
                loss: Tensor = self.trainer.compute_loss(self.trainer.model_wrapped, inputs)
            return loss

        return saved_for_backward(forward, self.model.parameters())


class _Gate:
    """Blocks the training loop until another thread lets one step pass."""

    def __init__(self) -> None:
        self._waiting, self._open = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None

    def wait(self) -> None:
        self._waiting.release()
        self._open.acquire()

    def fail(self, error: BaseException) -> None:
        self._failure = error
        self._waiting.release()

    def until_waiting(self) -> None:
        self._waiting.acquire()
        if self._failure is not None:
            raise self._failure

    def let_one_pass(self) -> None:
        self._open.release()
        self.until_waiting()


class _Samples(IterableDataset):
    """Endless: the sequences of the last seed that was set."""

    def __init__(self, run: RunConfig) -> None:
        self.run, self.seed = run, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            for row in step_tokens(self.run, self.seed).flatten(0, 1):
                yield _inputs(row)


def _inputs(tokens: Tensor) -> dict[str, Tensor]:
    """Labels are shifted already; with ``shift_labels`` the model does not shift again and drop the last one."""
    labels = tokens[..., 1:].contiguous()
    return {"input_ids": tokens[..., :-1], "labels": labels, "shift_labels": labels}


def _arguments(library: Any, run: RunConfig, directory: str) -> Any:
    optim, data = run.optim, run.data
    return library.TrainingArguments(
        output_dir=directory,
        max_steps=_MAX_STEPS,
        per_device_train_batch_size=data.micro_batch,
        gradient_accumulation_steps=data.global_batch // data.micro_batch,
        learning_rate=optim.lr,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.clip_norm,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=run.precision.compute == "bfloat16",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )


def _model(library: Any, run: RunConfig, implementation: str) -> nn.Module:
    model, attention, moe = run.model, run.model.attention, run.model.moe
    assert isinstance(attention, GQAConfig) and attention.qk_norm == "head" and moe is not None
    config = library.Qwen3MoeConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        num_hidden_layers=model.num_layers,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        intermediate_size=model.dense_hidden_dim,
        moe_intermediate_size=moe.expert_hidden_dim,
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        norm_topk_prob=moe.router.normalize,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope.theta},
        max_position_embeddings=run.data.seq_len,
        tie_word_embeddings=model.tied_embeddings,
        use_cache=False,
        experts_implementation=implementation,
    )
    made: nn.Module = library.Qwen3MoeForCausalLM(config).float().train()
    made.load_state_dict({_hf_name(name): _hf_layout(value) for name, value in initial_parameters(run).items()})
    return made


_NAMES = (
    ("embedding.", "model.embed_tokens."),
    ("final_norm.", "model.norm."),
    ("head.", "lm_head."),
    ("layers.", "model.layers."),
    (".attention_norm.", ".input_layernorm."),
    (".feed_forward_norm.", ".post_attention_layernorm."),
    (".attention.", ".self_attn."),
    (".feed_forward.router.", ".mlp.gate."),
    (".feed_forward.experts.", ".mlp.experts."),
    ("gate_up", "gate_up_proj"),
    ("experts.down", "experts.down_proj"),
    (".q.", ".q_proj."),
    (".k.", ".k_proj."),
    (".v.", ".v_proj."),
    (".out.", ".o_proj."),
)


def _hf_name(name: str) -> str:
    for moefold_name, hf_name in _NAMES:
        name = name.replace(moefold_name, hf_name)
    return name


def _hf_layout(value: Tensor) -> Tensor:
    """transformers has gate and up of an expert in one matrix."""
    return value.flatten(1, 2) if value.dim() == 4 else value
