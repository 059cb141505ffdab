"""Cross entropy over a vocabulary too large to write its logits down.

T tokens, D width, v this rank's vocabulary rows, c rows of one chunk.

A token's loss is log-sum-exp(logits) - logit(target). Both numbers are gathered while walking over the vocabulary in
chunks; backward computes each chunk's logits again. What is kept for it is the input, the weight and one number per
token. With the vocabulary cut over ranks, each rank returns its part of the two numbers and the caller merges them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefold.ops.fp32_linear import upcast


def vocab_stats(x_TD: Tensor, weight_vD: Tensor, target_T: Tensor, chunk: int = 8192) -> tuple[Tensor, Tensor]:
    """log-sum-exp over these rows, and the target's logit (0 where the target is not one of these rows)."""
    lse_T, target_logit_T = _VocabStats.apply(x_TD, weight_vD, target_T, chunk)
    return lse_T, target_logit_T


def vocab_stats_reference(x_TD: Tensor, weight_vD: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the full logits."""
    logits_Tv = upcast(x_TD @ weight_vD.to(x_TD.dtype).T)
    return logits_Tv.logsumexp(dim=-1), _target_logit(logits_Tv, target_T)


class _VocabStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_vD: Tensor, target_T: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        lse_T = upcast(x_TD.new_full(x_TD.shape[:1], -torch.inf))
        target_logit_T = torch.zeros_like(lse_T)
        for start in range(0, weight_vD.shape[0], chunk):
            logits_Tc = _logits(x_TD, weight_vD[start : start + chunk])
            target_logit_T += _target_logit(logits_Tc, target_T - start)
            lse_T = torch.logaddexp(lse_T, _logsumexp_(logits_Tc))
        ctx.save_for_backward(x_TD, weight_vD, target_T, lse_T)
        ctx.chunk = chunk
        return lse_T, target_logit_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_TD, weight_vD, target_T, lse_T = ctx.saved_tensors
        grad_lse_T, grad_target_T = grads
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx_TD = torch.zeros_like(upcast(x_TD)) if need_x else None
        dweight_vD = torch.empty_like(weight_vD) if need_weight else None
        for start in range(0, weight_vD.shape[0], ctx.chunk):
            weight_cD = weight_vD[start : start + ctx.chunk].to(x_TD.dtype)
            dlogits_Tc = _logits(x_TD, weight_cD).sub_(lse_T[:, None]).exp_().mul_(grad_lse_T[:, None])
            _add_at_target(dlogits_Tc, target_T - start, grad_target_T)
            dlogits_Tc = dlogits_Tc.to(x_TD.dtype)
            if dx_TD is not None:
                dx_TD += dlogits_Tc @ weight_cD
            if dweight_vD is not None:
                dweight_vD[start : start + ctx.chunk] = dlogits_Tc.T @ x_TD
        return (None if dx_TD is None else dx_TD.to(x_TD.dtype)), dweight_vD, None, None


def _logits(x_TD: Tensor, weight_cD: Tensor) -> Tensor:
    return upcast(x_TD @ weight_cD.to(x_TD.dtype).T)


def _logsumexp_(logits_Tc: Tensor) -> Tensor:
    """Uses the logits up: a second tensor of their size would cost more than the sums."""
    largest_T1 = logits_Tc.amax(dim=-1, keepdim=True)
    return logits_Tc.sub_(largest_T1).exp_().sum(dim=-1).log_() + largest_T1[:, 0]


def _target_logit(logits_Tc: Tensor, target_T: Tensor) -> Tensor:
    here_T, row_T = _among(target_T, logits_Tc.shape[1])
    return torch.where(here_T, logits_Tc.gather(1, row_T[:, None])[:, 0], 0.0)


def _add_at_target(dlogits_Tc: Tensor, target_T: Tensor, grad_T: Tensor) -> None:
    here_T, row_T = _among(target_T, dlogits_Tc.shape[1])
    dlogits_Tc.scatter_add_(1, row_T[:, None], torch.where(here_T, grad_T, 0.0)[:, None])


def _among(target_T: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Whether each target is one of these rows, and a row number that is safe to use either way."""
    return (target_T >= 0) & (target_T < num_rows), target_T.clamp(0, num_rows - 1)
