"""The gated delta rule: the paper's recurrence by single sums, transformers' two forms of it, and the layer around it.

Gated Delta Networks (arXiv 2412.06464), eq. 10, with S as [U, C]: S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) +
beta_t v_t k_t^T, o_t = S_t q_t. It is written out here with the matrix I - beta k k^T, which no code of ours forms.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.body.model_inputs import batch_of
from torch import Tensor

from moefold.attention.gated_delta_net import GatedDeltaNet
from moefold.attention.gated_delta_rule import (
    causal_conv,
    chunks_of,
    gated_delta_rule,
    gated_delta_rule_reference,
    gated_delta_rule_with_states,
    gated_delta_step,
    recompute_in_backward,
)
from moefold.config.attention import GatedDeltaNetConfig
from moefold.nn.batch import whole_batch
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.nn.parallel_interfaces import LocalTokens

KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 6, 5
# One document, several of all lengths around the size of a chunk, a document of one token, and none of zero tokens.
DOCUMENTS = ((11,), (5, 1, 9, 4, 8), (3, 3), (16,), (1,), (0, 4, 0, 7))


def inputs(lengths: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values, log decays and step sizes."""
    tokens, generator = sum(lengths), torch.Generator().manual_seed(sum(lengths))

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(KEY_HEADS, KEY), normal(KEY_HEADS, KEY), normal(VALUE_HEADS, VALUE)
    decay, beta = -normal(VALUE_HEADS).exp(), normal(VALUE_HEADS).sigmoid()
    return [x.to(dtype).requires_grad_() for x in (q, k, v, decay, beta)]


def written_out(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Token by token and head by head, in Python's floats."""
    rows, start = [], 0
    for length in lengths:
        for head in range(VALUE_HEADS):
            shared = head // (VALUE_HEADS // KEY_HEADS)
            state = [[0.0] * KEY for _ in range(VALUE)]
            for t in range(start, start + length):
                key, query = unit(k[t, shared].tolist()), unit(q[t, shared].tolist())
                alpha, b, value = math.exp(decay[t, head]), float(beta[t, head]), v[t, head].tolist()
                moved = [
                    [
                        sum(row[i] * alpha * ((i == j) - b * key[i] * key[j]) for i in range(KEY))
                        + b * value[u] * key[j]
                        for j in range(KEY)
                    ]
                    for u, row in enumerate(state)
                ]
                state = moved
                rows.append((t, head, [sum(s * x for s, x in zip(row, query)) / math.sqrt(KEY) for row in state]))
        start += length
    out = torch.zeros(start, VALUE_HEADS, VALUE, dtype=torch.float64)
    for t, head, row in rows:
        out[t, head] = torch.tensor(row)
    return out


def unit(row: list[float]) -> list[float]:
    length = math.sqrt(sum(x * x for x in row) + 1e-6)
    return [x / length for x in row]


@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
def test_the_recurrence_is_the_papers(lengths: tuple[int, ...]) -> None:
    given = [x.detach() for x in inputs(lengths)]
    torch.testing.assert_close(gated_delta_rule_reference(*given, lengths), written_out(*given, lengths))


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
def test_chunks_equal_the_recurrence_in_values_and_gradients(lengths: tuple[int, ...], chunk: int) -> None:
    given = inputs(lengths)
    out, reference = gated_delta_rule(*given, lengths, chunk), gated_delta_rule_reference(*given, lengths)
    torch.testing.assert_close(out, reference, rtol=1e-11, atol=1e-12)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for mine, theirs in zip(torch.autograd.grad(out, given, grad), torch.autograd.grad(reference, given, grad)):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("lengths", [(11,), (5, 2, 9, 4, 8), (3, 3), (16, 1)], ids=str)
def test_a_state_and_one_more_token_equal_the_recurrence(lengths: tuple[int, ...], chunk: int) -> None:
    """Documents without their last token leave a state, from which that token's output is computed alone."""
    given = [x.detach() for x in inputs(lengths)]
    ends = torch.tensor(lengths).cumsum(0) - 1
    before = torch.ones(sum(lengths), dtype=torch.bool)
    before[ends] = False
    out, states = gated_delta_rule_with_states(
        *(x[before] for x in given), tuple(length - 1 for length in lengths), chunk
    )
    last, after = gated_delta_step(*(x[ends] for x in given), states)
    expected = gated_delta_rule_reference(*given, lengths)
    torch.testing.assert_close(out, expected[before], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(last, expected[ends], rtol=1e-11, atol=1e-12)
    _, whole = gated_delta_rule_with_states(*given, lengths, chunk)
    torch.testing.assert_close(after, whole, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk", [4, 64])
def test_both_equal_transformers_in_values_and_gradients(chunk: int) -> None:
    """Its chunked form and its recurrence, each document as a batch of its own; it computes in float32."""
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    lengths, shared = (70, 3, 129), VALUE_HEADS // KEY_HEADS
    given = inputs(lengths, torch.float32)

    def with_transformers(rule: object) -> Tensor:
        parts = [x.split(lengths) for x in given]
        outs = []
        for q, k, v, decay, beta in zip(*parts):
            q, k = (x.repeat_interleave(shared, 1)[None] for x in (q, k))
            options = {"g": decay[None], "beta": beta[None], "use_qk_l2norm_in_kernel": True}
            outs.append(rule(q, k, v[None], **options)[0][0])  # type: ignore[operator]
        return torch.cat(outs)

    chunked = getattr(theirs.torch_chunk_gated_delta_rule, "__wrapped__", theirs.torch_chunk_gated_delta_rule)
    recurrent = getattr(theirs.torch_recurrent_gated_delta_rule, "__wrapped__", theirs.torch_recurrent_gated_delta_rule)
    ours = gated_delta_rule(*given, lengths, chunk)
    for rule in (chunked, recurrent):
        torch.testing.assert_close(ours, with_transformers(rule), rtol=1e-4, atol=1e-6)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3))
    reference = torch.autograd.grad(with_transformers(chunked), given, grad)
    for mine, other in zip(torch.autograd.grad(ours, given, grad), reference):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def test_the_convolution_sees_a_few_tokens_of_its_own_document() -> None:
    lengths, taps, channels = (2, 6, 1, 5), 4, 3
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((14, channels), (channels, taps))
    )
    positions = torch.cat([torch.arange(length) for length in lengths])
    expected, start = torch.zeros_like(x), 0
    for length in lengths:
        for t in range(length):
            for back in range(min(t, taps - 1) + 1):
                expected[start + t] += weight[:, taps - 1 - back] * x[start + t - back]
        start += length
    torch.testing.assert_close(causal_conv(x, weight, positions), expected)


def test_every_token_has_one_slot_and_long_documents_come_first() -> None:
    lengths, size = (5, 0, 1, 9, 4, 8), 4
    chunks = chunks_of(lengths, size, torch.device("cpu"))
    assert chunks.steps == (5, 3, 1) and chunks.token_Bn.shape == (9, 4)
    assert int(chunks.real_Bn.sum()) == sum(lengths)
    assert chunks.token_Bn.flatten()[chunks.slot_S].tolist() == list(range(sum(lengths)))
    assert chunks.real_Bn.flatten()[chunks.slot_S].all()
    # A chunk is part of one document.
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    for tokens, real in zip(chunks.token_Bn, chunks.real_Bn):
        assert len(set(document[tokens[real]].tolist())) == 1


def layer(dtype: torch.dtype = torch.float64) -> GatedDeltaNet:
    config = GatedDeltaNetConfig(KEY_HEADS, VALUE_HEADS, KEY, VALUE, chunk_size=4)
    made = GatedDeltaNet(config, 12, 1e-6, LocalTokens(), ParameterMatmul()).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for name, value in made.named_parameters():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        value.data.copy_(1 + 0.2 * noise if "norm" in name else 0.4 * noise)
    return made


def test_the_layer_equals_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(
        hidden_size=12,
        num_hidden_layers=2,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
    )
    ours, other = layer(torch.float32), theirs.Qwen3NextGatedDeltaNet(config, 0)
    names = {
        "in_proj_qkvz.weight": "qkvz.weight",
        "in_proj_ba.weight": "ba.weight",
        "conv1d.weight": "conv",
        "out_proj.weight": "linear_out.weight",
    }
    state = ours.state_dict()
    other.load_state_dict({name: state[names.get(name, name)].view_as(v) for name, v in other.state_dict().items()})
    batch, x = batch_of(2, 23, 9), torch.randn(46, 12, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = other(x.view(2, 23, 12)).flatten(0, 1)
        torch.testing.assert_close(ours(x, batch), expected, rtol=1e-4, atol=1e-6)


def test_documents_of_a_microbatch_do_not_see_each_other() -> None:
    """Together as each by itself, in values and gradients; and a token changes nothing before it."""
    ours, lengths = layer(), (5, 1, 9, 4)
    x = torch.randn(sum(lengths), 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x.requires_grad_()

    def batch(lengths: tuple[int, ...]) -> object:
        tokens = torch.zeros(sum(lengths), dtype=torch.int64)
        return whole_batch(tokens, tokens, lengths, step_labels=1, step_tokens=1)

    together = ours(x, batch(lengths))
    alone = torch.cat([ours(part, batch((len(part),))) for part in x.split(lengths)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-13)
    grad = torch.randn(together.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = (x, *ours.parameters())
    for mine, theirs in zip(torch.autograd.grad(together, wanted, grad), torch.autograd.grad(alone, wanted, grad)):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    (seen,) = torch.autograd.grad(ours(x, batch(lengths))[13].sum(), x)
    assert seen.abs().sum(-1).nonzero().flatten().tolist() == list(range(6, 14))


def test_no_tokens_are_no_error() -> None:
    ours = layer()
    tokens = torch.zeros(0, dtype=torch.int64)
    batch = whole_batch(tokens, tokens, (), step_labels=1, step_tokens=1)
    ours(torch.zeros(0, 12, dtype=torch.float64), batch).sum().backward()
    assert all(value.grad is not None and not value.grad.any() for value in ours.parameters())


def test_a_recomputed_function_saves_its_inputs_and_has_the_same_gradients() -> None:
    x, w = (torch.randn(7, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    number = torch.arange(7)
    saved: list[Tensor] = []

    def run(x: Tensor, number: Tensor, w: Tensor) -> Tensor:
        return ((x * w).exp().sin() * number[:, None]).tanh()

    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = recompute_in_backward(run, x, number, w)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (x, number, w)]
    grads, plain = torch.autograd.grad(out.sum(), (x, w)), torch.autograd.grad(run(x, number, w).sum(), (x, w))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads, plain))
