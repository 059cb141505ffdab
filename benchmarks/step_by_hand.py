"""A training step written by hand in plain torch, with the same kernels.

T tokens of a microbatch, D model dim, H heads (query or KV), C head dim, E experts, K experts per token.

No modules, no parallelism, no phases, no schedule, no metrics: the difference to moefold's step is moefold's overhead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.runner import Options
from benchmarks.timed_layer import saved_for_backward
from moefold.attention.sdpa import attend
from moefold.bench.step_bench import run_for_bench, step_tokens
from moefold.blueprint.param_groups import NO_DECAY_KINDS
from moefold.blueprint.parameters import init_std, parameters
from moefold.checks.kernels import experts_in_use
from moefold.config.attention import GQAConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import ExpertInput, Routing
from moefold.moe.expert_backends import expert_backend
from moefold.moe.experts import ExpertWeights
from moefold.moe.moe_kernels import kernels_for
from moefold.moe.topk import choose_topk
from moefold.nn.init import init_values
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.ops.cross_entropy import vocab_stats
from moefold.ops.fp32_linear import fp32_linear
from moefold.ops.rmsnorm import rms_norm
from moefold.ops.rope import rotary_tables, rotate
from moefold.precision.dtypes import TORCH_FORMATS


def run_of(options: Options) -> RunConfig:
    return run_for_bench(options["dtype"], options.get("set"))


def initial_parameters(run: RunConfig) -> dict[str, Tensor]:
    """Every parameter's initial value, by moefold's name."""
    values = {}
    for spec in parameters(run.model):
        values[spec.name] = torch.empty(spec.shape)
        whole = tuple(slice(0, size) for size in spec.shape)
        init_values(
            spec.kind, run.seed, spec.name, spec.shape, whole, init_std(run.model, spec.name), values[spec.name]
        )
    return values


class StepByHand:
    def __init__(self, options: Options) -> None:
        run = run_of(options)
        attention, moe = run.model.attention, run.model.moe
        assert isinstance(attention, GQAConfig) and attention.qk_norm == "head" and moe is not None
        self.model, self.attention, self.moe, self.run_config = run.model, attention, moe, run
        self.dtype = TORCH_FORMATS[run.precision.compute]
        self.w = {name: nn.Parameter(value) for name, value in initial_parameters(run).items()}
        kernels = kernels_for(run, "cpu")
        self.experts = expert_backend(experts_in_use(run, "cpu"), ParameterMatmul(), kernels=kernels)(moe)
        self.optimizer = _adamw(run, self.w)
        self.loss = self.norm = 0.0

    def prepare(self, seed: int) -> Tensor:
        return step_tokens(self.run_config, seed)

    def run(self, prepared: Tensor) -> None:
        self.optimizer.zero_grad()
        total = prepared[..., 1:].numel()
        self.loss = 0.0
        for microbatch in prepared:
            loss, balance = self.losses(microbatch, total)
            (loss + balance).backward()
            self.loss += float(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.w.values(), self.run_config.optim.clip_norm)
        self.optimizer.step()
        self.norm = float(norm)

    def saved_bytes(self, prepared: Tensor) -> int:
        total = prepared[..., 1:].numel()
        return saved_for_backward(lambda: sum(self.losses(prepared[0], total), torch.zeros(())), self.w.values())

    def losses(self, tokens: Tensor, step_tokens: int) -> tuple[Tensor, Tensor]:
        """Of one microbatch: cross entropy per token of the step, and the balance loss."""
        w, eps, lengths = self.w, self.model.norm_eps, (tokens.shape[1] - 1,) * tokens.shape[0]
        positions = torch.arange(lengths[0]).repeat(tokens.shape[0])
        angles = rotary_tables(self.model.rope, self.attention.head_dim, positions, torch.float32)
        x_TD = F.embedding(tokens[:, :-1].flatten(), w["embedding.weight"]).to(self.dtype)
        balance = torch.zeros(())
        for layer in range(self.model.num_layers):
            at = f"layers.{layer}"
            h_TD = rms_norm(x_TD, w[f"{at}.attention_norm.weight"], eps)
            x_TD = x_TD + self._attention(f"{at}.attention", h_TD, angles, lengths)
            h_TD = rms_norm(x_TD, w[f"{at}.feed_forward_norm.weight"], eps)
            y_TD, layer_balance = self._moe(f"{at}.feed_forward", h_TD)
            x_TD, balance = x_TD + y_TD, balance + layer_balance
        h_TD = rms_norm(x_TD, w["final_norm.weight"], eps)
        lse_T, target_T = vocab_stats(h_TD, w["head.weight"], tokens[:, 1:].flatten())
        coefficient = self.moe.balance.microbatch * self.moe.num_experts / step_tokens
        return (lse_T - target_T).sum() / step_tokens, balance * coefficient

    def _attention(self, at: str, h_TD: Tensor, angles: tuple[Tensor, Tensor], lengths: tuple[int, ...]) -> Tensor:
        w, d, eps = self.w, self.attention.head_dim, self.model.norm_eps
        q_THC, k_THC, v_THC = (self._linear(f"{at}.{name}.weight", h_TD).unflatten(1, (-1, d)) for name in "qkv")
        q_THC = rotate(rms_norm(q_THC, w[f"{at}.q_norm.weight"], eps), *angles, interleaved=False)
        k_THC = rotate(rms_norm(k_THC, w[f"{at}.k_norm.weight"], eps), *angles, interleaved=False)
        return self._linear(f"{at}.out.weight", attend(q_THC, k_THC, v_THC, lengths, d**-0.5).flatten(1))

    def _moe(self, at: str, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output, and its balance loss before the coefficient."""
        w, num_experts = self.w, self.moe.num_experts
        scores_TE = fp32_linear(h_TD, w[f"{at}.router.weight"], None, torch.float32).softmax(-1)
        expert_TK = choose_topk(scores_TE.detach(), self.moe.top_k)
        prob_TK = scores_TE.gather(1, expert_TK)
        prob_TK = prob_TK / prob_TK.sum(-1, keepdim=True)
        rows_E = expert_TK.flatten().bincount(minlength=num_experts)
        arrived = ExpertInput(h_TD, Routing(expert_TK, prob_TK), rows_E, rows_E.tolist(), None, None)
        weights = ExpertWeights(w[f"{at}.experts.gate_up"], w[f"{at}.experts.down"], None, None, 1.0)
        return self.experts(arrived, weights), (rows_E / expert_TK.numel() * scores_TE).sum()

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[name].to(x.dtype))


def _adamw(run: RunConfig, w: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    kinds, optim = {spec.name: spec.kind for spec in parameters(run.model)}, run.optim
    decayed = [parameter for name, parameter in w.items() if kinds[name] not in NO_DECAY_KINDS]
    others = [parameter for name, parameter in w.items() if kinds[name] in NO_DECAY_KINDS]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, optim.lr, (optim.beta1, optim.beta2), optim.eps, fused=True)
