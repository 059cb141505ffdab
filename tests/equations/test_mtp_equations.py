"""Multi-token prediction as DeepSeek-V3 publishes it, eq. 21 to 25, by loops over sequences, depths and tokens.

    h'_i = M_k [RMSNorm(Emb(t_{i+k})); RMSNorm(h_i)]           i = 1 .. T - k, h of depth k - 1
    h    = TRM_k(h')                                            the block, on the T - k tokens of this depth
    L_k  = -1/T * sum over i of log P_i[t_i]                    i = 2 + k .. T + 1
    L    = lambda / D * sum over k of L_k

T is the length of the input sequence at every depth. Megatron divides by the labels that count at depth k instead;
that is `model.mtp_divisor: labels`. The blocks are the model's (they have oracles of their own), run here one sequence
at a time and only on the tokens that the paper gives them; norms, joins, heads, cross entropies and divisors are
written out. The order of the joined row and the norm on h are those of the published weights.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from tests.staged_runs import microbatches, share_on
from torch import Tensor

from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.model.decoder import Decoder
from moefold.nn.batch import IGNORED, Batch, whole_batch
from moefold.pipeline.runtime import run_schedule

DEPTHS, WEIGHT, D = 2, 0.3, 8
MODEL = ModelConfig(
    vocab_size=11,
    dim=D,
    num_layers=1,
    attention=GQAConfig(num_heads=2, num_kv_heads=1, head_dim=4),
    moe=None,
    dense_hidden_dim=12,
    init_std=0.4,
    num_mtp=DEPTHS,
    mtp_weight=WEIGHT,
)
RUN = RunConfig(
    model=MODEL,
    precision=PrecisionConfig(params="float64", compute="float64"),
    kernels=KernelsConfig(experts="sequential"),
)
# Two microbatches of documents; one is too short to have a label at depth two.
SHAPES = ((7, 2), (5,))


def rms_norm(x_D: Tensor, weight_D: Tensor) -> Tensor:
    square = torch.zeros((), dtype=torch.float64)
    for d in range(D):
        square = square + x_D[d] * x_D[d]
    return torch.stack([x_D[d] * weight_D[d] for d in range(D)]) / torch.sqrt(square / D + MODEL.norm_eps)


def cross_entropy(head_VD: Tensor, x_D: Tensor, label: int) -> Tensor:
    logits = [sum(row[d] * x_D[d] for d in range(D)) for row in head_VD]
    total = sum(torch.exp(logit) for logit in logits)
    return -torch.log(torch.exp(logits[label]) / total)


def alone(tokens: Tensor) -> Batch:
    """One sequence as a batch of its own, for the block."""
    count = len(tokens)
    return whole_batch(tokens, tokens, (count,), step_labels=1, step_tokens=1)


def sums_of(decoder: Decoder, tokens_T: Tensor, labels_T: Tensor) -> tuple[list[Tensor], list[int]]:
    """Summed cross entropies of one sequence at depth 0 (the next token), 1, ..., and the labels that count there."""
    assert decoder.embedding is not None and decoder.final_norm is not None
    embedding, head = decoder.embedding.weight, decoder.head_weight
    h = decoder.layers["0"](torch.stack([embedding[token] for token in tokens_T]), alone(tokens_T)).x_tD
    norm = decoder.final_norm.weight
    sums, counts = [], []
    for k in range(DEPTHS + 1):
        reach = len(tokens_T) - k
        if k > 0 and reach > 0:
            module = decoder.mtp[str(k - 1)]
            rows = []
            for i in range(reach):
                token = rms_norm(embedding[tokens_T[i + k]], module.token_norm.weight)
                hidden = rms_norm(rms_norm(h[i], norm), module.hidden_norm.weight)
                joined = torch.cat((token, hidden))
                rows.append(torch.stack([sum(row[d] * joined[d] for d in range(2 * D)) for row in module.join.weight]))
            h = module.block(torch.stack(rows), alone(tokens_T[:reach])).x_tD
            norm = decoder.mtp_norms[str(k - 1)].weight
        places = [i for i in range(max(reach, 0)) if labels_T[i + k] != IGNORED]
        losses = [cross_entropy(head, rms_norm(h[i], norm), int(labels_T[i + k])) for i in places]
        sums.append(sum(losses, torch.zeros((), dtype=torch.float64)))
        counts.append(len(places))
    return sums, counts


def written_out(decoder: Decoder, batches: list[Batch], divisor: str) -> tuple[Tensor, Tensor]:
    """The loss of the next token, and that of all depths together."""
    sequences = []
    for batch in batches:
        first = 0
        for length in batch.lengths:
            part = slice(first, first + length)
            sequences.append((batch.tokens_S[part], batch.labels_S[part]))
            first += length
    found = [sums_of(decoder, tokens, labels) for tokens, labels in sequences]
    tokens = sum(len(tokens) for tokens, _ in sequences)
    main = sum(sums[0] for sums, _ in found) / sum(counts[0] for _, counts in found)
    ahead = torch.zeros((), dtype=torch.float64)
    for k in range(1, DEPTHS + 1):
        labels = sum(counts[k] for _, counts in found)
        summed = sum(sums[k] for sums, _ in found)
        ahead = ahead + WEIGHT / DEPTHS * summed / (tokens if divisor == "tokens" else labels)
    return main, ahead


@pytest.mark.parametrize("divisor", ["tokens", "labels"])
def test_a_step_is_the_published_equation(divisor: Literal["tokens", "labels"]) -> None:
    run = RUN if divisor == "tokens" else replace(RUN, model=replace(MODEL, mtp_divisor=divisor))
    share, batches = share_on(run), microbatches(run, SHAPES, seed=4)
    sums = run_schedule(share, batches)
    found = {name: parameter.grad for name, parameter in share.model.named_parameters()}
    main, ahead = written_out(share.model, batches, divisor)
    torch.testing.assert_close(sums.loss, main.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(sums.mtp_loss, ahead.detach(), rtol=1e-12, atol=0)
    named = dict(share.model.named_parameters())
    expected = torch.autograd.grad(main + ahead, list(named.values()))
    for name, gradient in zip(named, expected, strict=True):
        got = found[name]
        assert got is not None and gradient.abs().max() > 0, name
        torch.testing.assert_close(got, gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_the_divisor_is_the_paper_s_by_default() -> None:
    """DeepSeek-V3 on one sequence without a masked label: -1/T times the sum, T the input's length at every depth."""
    share, length = share_on(RUN), 6
    stream = torch.randint(MODEL.vocab_size, (length + 1,), generator=torch.Generator().manual_seed(2))
    tokens, labels = stream[:-1], stream[1:]
    batch = whole_batch(
        tokens,
        labels,
        (length,),
        step_labels=length,
        step_tokens=length,
        num_ahead=DEPTHS,
    )
    sums, counts = sums_of(share.model, tokens, labels)
    assert counts == [6, 5, 4]
    want = WEIGHT / DEPTHS * (sums[1].item() / length + sums[2].item() / length)
    assert math.isclose(float(run_schedule(share, [batch]).mtp_loss), want, rel_tol=1e-12)
