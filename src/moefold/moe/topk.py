"""From logits to scores, from scores to assignments, and which assignments count.

Assignments are integers without a gradient. Equal scores go to the lower expert number or the earlier token, so the
same scores give the same assignments on every machine. Rules that compare tokens see one microbatch.

**Capacity** is how many assignments an expert, or a device full of experts, accepts, and which ones when there are
more. It holds per owner (an expert, or a device with its experts) and per set of tokens: the whole microbatch, which no
layout changes, or a rank's own shard. Ranks are computed on the device and every shape is known beforehand, so dropping
needs no sync.

**Padding** tokens are computed like all others, but must not change anything. Attention and the loss need no help, as
padding is at the end of its document and has no labels. A router needs it: padding must not be sent to experts, take
another token's capacity, or count towards any expert's load.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, log
from typing import Literal, Protocol

import torch
from torch import Tensor

from moefold.nn.batch import Batch, TokenSets
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.ops.segments import count_keys, rank_within_key


def score(logits_tE: Tensor, kind: Literal["softmax", "sigmoid"]) -> Tensor:
    """softmax: experts compete for a token. sigmoid: each expert scores a token independently."""
    return logits_tE.softmax(-1) if kind == "softmax" else logits_tE.sigmoid()


# For tokens whose scores are all zero: none of their assignments is kept, or sigmoids underflow.
TINY = 1e-20


def normalize_probs(prob_tK: Tensor) -> Tensor:
    """Divided by the sum over a token's experts."""
    normalized: Tensor = _NormalizeProbs.apply(prob_tK)
    return normalized


def normalize_probs_reference(prob_tK: Tensor) -> Tensor:
    return prob_tK / (prob_tK.sum(-1, keepdim=True) + TINY)


class _Saved(Protocol):
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _NormalizeProbs(torch.autograd.Function):
    """p = s / sum(s), whose gradient is (dp - sum(dp p)) / sum(s): half the operations that autograd would need."""

    @staticmethod
    def forward(ctx: _Saved, score_tK: Tensor) -> Tensor:
        sum_t1 = score_tK.sum(-1, keepdim=True).add_(TINY)
        prob_tK = score_tK / sum_t1
        ctx.save_for_backward(prob_tK, sum_t1)
        return prob_tK

    @staticmethod
    def backward(ctx: _Saved, dprob_tK: Tensor) -> Tensor:
        prob_tK, sum_t1 = ctx.saved_tensors
        return (dprob_tK - (dprob_tK * prob_tK).sum(-1, keepdim=True)).div_(sum_t1)


def choose_topk(scores_tE: Tensor, k: int) -> Tensor:
    """Each token's k best experts, best first.

    ``topk`` does not say how it breaks ties. On a CPU, where a sort takes several times as long, it is given keys that
    have none.
    """
    if scores_tE.device.type == "cpu" and scores_tE.dtype in (torch.float32, torch.bfloat16):
        return _keys_without_ties(scores_tE).topk(k, dim=-1).indices
    return choose_topk_reference(scores_tE, k)


def choose_topk_reference(scores_tE: Tensor, k: int) -> Tensor:
    """A stable sort of everything."""
    # A copy, because a slice would keep the whole argsort alive.
    return scores_tE.argsort(dim=-1, descending=True, stable=True)[:, :k].clone()


def _keys_without_ties(scores_tE: Tensor) -> Tensor:
    """Whole numbers in the order of the scores, and of falling expert numbers where these are equal.

    The bits of a float are in order as they are; those of negative ones run backwards. Adding 0 makes 0 of -0.
    """
    bits_tE = (scores_tE.float() + 0.0).view(torch.int32)
    ordered_tE = bits_tE ^ ((bits_tE >> 31) & 0x7FFFFFFF)
    num_experts = scores_tE.shape[-1]
    return ordered_tE.long() * num_experts - torch.arange(num_experts, device=scores_tE.device)


def limit_groups(scores_tE: Tensor, num_groups: int, top_groups: int, terms: int) -> Tensor:
    """Rule out experts outside a token's best groups, so that its rows travel to few ranks.

    A group's score is the sum of its ``terms`` best experts' scores.
    """
    grouped_tXY = scores_tE.unflatten(-1, (num_groups, -1))
    group_score_tX = grouped_tXY.topk(min(terms, grouped_tXY.shape[-1]), dim=-1).values.sum(-1)
    open_tX = torch.zeros_like(group_score_tX, dtype=torch.bool).scatter(
        1, choose_topk(group_score_tX, top_groups), True
    )
    return grouped_tXY.masked_fill(~open_tX[:, :, None], -torch.inf).flatten(-2)


def sinkhorn(logits_TE: Tensor, iterations: int) -> Tensor:
    """Log of a transport plan: exp(logits), rescaled in turn so that each token gives 1 and each expert gets its share.

    A fixed number of iterations, so that ranks need not agree on convergence. In logs, because exp(logits)
    overflows, and in float32 at least, because the plan is a product of many factors.
    """
    dtype = torch.promote_types(logits_TE.dtype, torch.float32)
    plan_TE = logits_TE.to(dtype)
    log_share = log(plan_TE.shape[0] / plan_TE.shape[1])
    for _ in range(iterations):
        plan_TE = plan_TE - plan_TE.logsumexp(1, keepdim=True)
        plan_TE = plan_TE - plan_TE.logsumexp(0, keepdim=True) + log_share
    return plan_TE


def choose_by_experts(scores_TE: Tensor, capacity: int) -> Tensor:
    """Expert choice: each expert takes its ``capacity`` best tokens. True where it did, [T, E]."""
    best_XE = scores_TE.argsort(dim=0, descending=True, stable=True)[:capacity]
    return torch.zeros_like(scores_TE, dtype=torch.bool).scatter(0, best_XE, True)


def choose_balanced(token_t: Tensor, num_experts: int, k: int) -> Tensor:
    """Round robin by the token's number in its microbatch, not in its shard: no layout may change who goes where."""
    return (token_t[:, None] * k + torch.arange(k, device=token_t.device)) % num_experts


def sinkhorn_reference(logits_TE: Tensor, iterations: int) -> Tensor:
    """The plan itself instead of its log."""
    plan_TE = logits_TE.double().exp()
    for _ in range(iterations):
        plan_TE = plan_TE / plan_TE.sum(1, keepdim=True)
        plan_TE = plan_TE / plan_TE.sum(0, keepdim=True) * (plan_TE.shape[0] / plan_TE.shape[1])
    return plan_TE


def choose_by_experts_reference(scores_TE: Tensor, capacity: int) -> Tensor:
    """Every expert reads through all tokens."""
    kept_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
    for expert in range(scores_TE.shape[1]):
        tokens = sorted(range(scores_TE.shape[0]), key=lambda token: (-scores_TE[token, expert].item(), token))
        kept_TE[tokens[:capacity], expert] = True
    return kept_TE


def capacity_of(num_tokens: int, factor: float, top_k: int, num_owners: int) -> int:
    """ceil(factor * tokens * top_k / owners), at least 1.

    In fractions of the decimal the user wrote: in floats, 0.1 * 30 is a little over 3 and would be rounded up to 4.
    """
    return max(1, ceil(Fraction(str(factor)) * num_tokens * top_k / num_owners))


def keep_within_capacity(
    owner_TK: Tensor, priority_TK: Tensor | None, set_of_token_T: Tensor, capacities: tuple[int, ...], num_owners: int
) -> Tensor:
    """True for the assignments within capacity; ``capacities`` has one entry per set.

    Higher priority goes first and equal ones by position; without priorities it is first come, first served, by token
    and then by k.
    """
    set_TK = set_of_token_T[:, None].expand_as(owner_TK)
    rank_N = rank_within_key(
        (set_TK * num_owners + owner_TK).flatten(),
        len(capacities) * num_owners,
        None if priority_TK is None else priority_TK.flatten(),
    )
    # One fill per set: a device tensor made from a Python list would wait for a copy.
    capacity_Q = torch.stack([torch.full((), capacity, device=owner_TK.device) for capacity in capacities])
    return rank_N.view_as(owner_TK) < capacity_Q[set_of_token_T][:, None]


def keep_within_capacity_reference(
    owner_TK: Tensor, priority_TK: Tensor | None, set_of_token_T: Tensor, capacities: tuple[int, ...], num_owners: int
) -> Tensor:
    """Fill each owner of each set from the sorted list of its assignments."""
    kept_TK = torch.zeros_like(owner_TK, dtype=torch.bool)
    num_tokens, top_k = owner_TK.shape
    for token_set, capacity in enumerate(capacities):
        for owner in range(num_owners):
            asks = [
                (0.0 if priority_TK is None else -priority_TK[token, k].item(), token, k)
                for token in range(num_tokens)
                for k in range(top_k)
                if set_of_token_T[token] == token_set and owner_TK[token, k] == owner
            ]
            for _, token, k in sorted(asks)[:capacity]:
                kept_TK[token, k] = True
    return kept_TK


def real_tokens(batch: Batch, tokens: TokenSharding) -> Tensor | None:
    """False for padding tokens of this rank; None where there is no padding."""
    return None if batch.real_S is None else tokens.tp_shard(batch.real_S)


def keep_real(expert_tK: Tensor, kept_tK: Tensor | None, real_t: Tensor | None) -> Tensor | None:
    """The kept assignments without those of padding tokens."""
    if real_t is None:
        return kept_tK
    real_tK = real_t[:, None].expand_as(expert_tK)
    return real_tK if kept_tK is None else kept_tK & real_tK


def only_real(sets: TokenSets, real: Tensor) -> TokenSets:
    """The same sets without padding tokens, which become one more set, the last. Reads the sizes back."""
    num_sets = len(sets.sizes)
    set_of_token = torch.where(real, sets.set_of_token_T, num_sets)
    return TokenSets(set_of_token, tuple(count_keys(set_of_token, num_sets + 1).tolist()))
