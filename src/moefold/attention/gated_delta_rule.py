"""The gated delta rule: linear attention whose memory of a document is one matrix per head.

Token t has a query q, a key k, a value v, a step size beta in (0, 1) and a decay alpha in (0, 1). With S the [C, U]
matrix that maps keys to values (Gated Delta Networks, arXiv 2412.06464, eq. 10),

    S_t = alpha_t S_{t-1} + k_t (beta_t (v_t - (alpha_t S_{t-1})^T k_t))^T        o_t = S_t^T q_t

A token replaces, by beta, the value that the faded memory has for its key. Queries and keys have length one, and then
queries are divided by sqrt(C). ``gated_delta_rule_reference`` is this recurrence, token by token.

``gated_delta_rule`` computes a chunk of n tokens by matmuls. With G the cumulative sum of log alpha in the chunk and S
the state before it, what the chunk writes (delta) solves a triangular system (DeltaNet, arXiv 2406.06484, section 3):

    delta_t = beta_t v_t - beta_t exp(G_t) S^T k_t - sum over j < t of beta_t exp(G_t - G_j) (k_t . k_j) delta_j
    o_t     = exp(G_t) S^T q_t + sum over j <= t of exp(G_t - G_j) (q_t . k_j) delta_j

The system is linear in S, so it is solved for all chunks at once, for values and for keys; then a scan over chunks
carries the state. Documents do not see each other: each starts with an empty state at the beginning of a chunk, and the
scan takes chunk i of all documents together. So it has as many steps as the longest document has chunks.

For generation ``gated_delta_rule_with_states`` also returns each document's last state, and ``gated_delta_step`` is the
recurrence for one more token of each.

Everything is computed in at least float32.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.fp32_linear import upcast

# Under the root of a key's squared length, as in the published models.
_EPS = 1e-6


def gated_delta_rule_reference(
    q_SJC: Tensor, k_SJC: Tensor, v_SHU: Tensor, log_decay_SH: Tensor, beta_SH: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """The recurrence, one token after the other; several value heads may share a query and a key."""
    shared = v_SHU.shape[1] // q_SJC.shape[1]
    q_SHC, k_SHC = (_unit(x_SJC).repeat_interleave(shared, 1) for x_SJC in (q_SJC, k_SJC))
    q_SHC = q_SHC * q_SHC.shape[-1] ** -0.5
    v, alpha, beta = upcast(v_SHU), log_decay_SH.exp(), beta_SH
    out, token = [], 0
    for length in lengths:
        state_HCU = v.new_zeros(v.shape[1], q_SHC.shape[-1], v.shape[-1])
        for _ in range(length):
            state_HCU = alpha[token][:, None, None] * state_HCU
            known_HU = torch.einsum("hcu,hc->hu", state_HCU, k_SHC[token])
            delta_HU = beta[token][:, None] * (v[token] - known_HU)
            state_HCU = state_HCU + k_SHC[token][:, :, None] * delta_HU[:, None, :]
            out.append(torch.einsum("hcu,hc->hu", state_HCU, q_SHC[token]))
            token += 1
    return torch.stack(out).to(v_SHU.dtype) if out else torch.zeros_like(v_SHU)


def gated_delta_rule(
    q_SJC: Tensor,
    k_SJC: Tensor,
    v_SHU: Tensor,
    log_decay_SH: Tensor,
    beta_SH: Tensor,
    lengths: tuple[int, ...],
    chunk_size: int,
) -> Tensor:
    """[S, H, U]. ``log_decay_SH`` and ``beta_SH`` are float32 or wider."""
    if not v_SHU.shape[0]:
        return v_SHU
    chunks = chunks_of(lengths, chunk_size, v_SHU.device)
    return _chunked(q_SJC, k_SJC, v_SHU, log_decay_SH, beta_SH, chunks, None)


def gated_delta_rule_with_states(
    q_SJC: Tensor,
    k_SJC: Tensor,
    v_SHU: Tensor,
    log_decay_SH: Tensor,
    beta_SH: Tensor,
    lengths: tuple[int, ...],
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """The same, and the state [B, H, C, U] after the last token of each of the B documents."""
    states: list[Tensor] = []
    chunks = chunks_of(lengths, chunk_size, v_SHU.device)
    out_SHU = _chunked(q_SJC, k_SJC, v_SHU, log_decay_SH, beta_SH, chunks, states)
    # The longest document ended last.
    state_BHCU = torch.cat(states[::-1]).flatten(1, 2)
    by_number = torch.tensor(chunks.documents, device=v_SHU.device)
    zeros = state_BHCU.new_zeros(len(lengths), *state_BHCU.shape[1:])
    return out_SHU, zeros.index_copy(0, by_number, state_BHCU)


def gated_delta_step(
    q_BJC: Tensor, k_BJC: Tensor, v_BHU: Tensor, log_decay_BH: Tensor, beta_BH: Tensor, state_BHCU: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each document after the state that it has: its output, and the new state."""
    shared = v_BHU.shape[1] // q_BJC.shape[1]
    q_BHC, k_BHC = (_unit(x_BJC).repeat_interleave(shared, 1) for x_BJC in (q_BJC, k_BJC))
    faded_BHCU = log_decay_BH.exp()[..., None, None] * state_BHCU
    known_BHU = torch.einsum("bhcu,bhc->bhu", faded_BHCU, k_BHC)
    delta_BHU = beta_BH[..., None] * (upcast(v_BHU) - known_BHU)
    state_BHCU = faded_BHCU + k_BHC[..., None] * delta_BHU[..., None, :]
    out_BHU = torch.einsum("bhcu,bhc->bhu", state_BHCU, q_BHC * q_BHC.shape[-1] ** -0.5)
    return out_BHU.to(v_BHU.dtype), state_BHCU


def _chunked(
    q_SJC: Tensor,
    k_SJC: Tensor,
    v_SHU: Tensor,
    log_decay_SH: Tensor,
    beta_SH: Tensor,
    chunks: Chunks,
    states: list[Tensor] | None,
) -> Tensor:
    q_BJnC, k_BJnC = (_in_chunks(_unit(x_SJC), chunks) for x_SJC in (q_SJC, k_SJC))
    by_key_head = (q_SJC.shape[1], -1)
    v_BJgnU = _in_chunks(upcast(v_SHU), chunks).unflatten(1, by_key_head)
    # Slots after the end of a document write nothing and fade nothing.
    empty_Bn = ~chunks.real_Bn[:, None, None]
    beta_BJgn, log_decay_BJgn = (
        _in_chunks(x_SH, chunks).unflatten(1, by_key_head).masked_fill(empty_Bn, 0.0)
        for x_SH in (beta_SH, log_decay_SH)
    )
    q_BJnC = q_BJnC * q_BJnC.shape[-1] ** -0.5
    out_BJgnU = _all_chunks(q_BJnC, k_BJnC, v_BJgnU, log_decay_BJgn, beta_BJgn, chunks.steps, states)
    return out_BJgnU.flatten(1, 2).transpose(1, 2).flatten(0, 1)[chunks.slot_S].to(v_SHU.dtype)


def _all_chunks(
    q_BJnC: Tensor,
    k_BJnC: Tensor,
    v_BJgnU: Tensor,
    log_decay_BJgn: Tensor,
    beta_BJgn: Tensor,
    steps: tuple[int, ...],
    states: list[Tensor] | None,
) -> Tensor:
    """``states``, if given, gets those of documents when they end; training needs none of them."""
    total_BJgn = log_decay_BJgn.cumsum(-1)
    last_BJg1 = total_BJgn[..., -1:]
    n = total_BJgn.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool, device=total_BJgn.device).triu(1)
    fade_BJgnm = (total_BJgn[..., :, None] - total_BJgn[..., None, :]).masked_fill(later, -torch.inf).exp()
    k_BJCn, k_BJ1nC, seen_BJgn = k_BJnC.transpose(-1, -2), k_BJnC[:, :, None], total_BJgn.exp()[..., None]
    # The diagonal counts as one, and what is above it is not read.
    system_BJgnm = (k_BJnC @ k_BJCn)[:, :, None] * fade_BJgnm * beta_BJgn[..., None]
    written = torch.cat((v_BJgnU, k_BJ1nC * seen_BJgn), dim=-1) * beta_BJgn[..., None]
    solved = torch.linalg.solve_triangular(system_BJgnm, written, upper=False, unitriangular=True)
    own_BJgnU, known_BJgnC = solved.split((v_BJgnU.shape[-1], k_BJnC.shape[-1]), dim=-1)
    scores_BJgnm = (q_BJnC @ k_BJCn)[:, :, None] * fade_BJgnm
    q_BJgnC = q_BJnC[:, :, None] * seen_BJgn
    k_BJgCn = (k_BJ1nC * (last_BJg1 - total_BJgn).exp()[..., None]).transpose(-1, -2)
    keep_BJg11 = last_BJg1.exp()[..., None]

    outs, state, first = [], None, 0
    for step, documents in enumerate(steps):
        # Documents stand in the order of their lengths, so those that go on are the first ones.
        here = slice(first, first + documents)
        delta, out = own_BJgnU[here], None
        if state is not None:
            delta = delta - known_BJgnC[here] @ state
            out = q_BJgnC[here] @ state
        inside = scores_BJgnm[here] @ delta
        outs.append(inside if out is None else out + inside)
        on = steps[step + 1] if step + 1 < len(steps) else 0
        wanted = on if states is None else documents
        written_QJgCU = k_BJgCn[first : first + wanted] @ delta[:wanted]
        if state is not None:
            written_QJgCU = written_QJgCU + state[:wanted] * keep_BJg11[first : first + wanted]
        if states is not None:
            states.append(written_QJgCU[on:])
        state = written_QJgCU[:on]
        first += documents
    return torch.cat(outs)


class Chunks(NamedTuple):
    """Where the tokens of all documents lie in chunks: first the first chunk of every document, the longest document
    first, then the second chunk of those that have one, and so on. ``steps``: how many documents have an i-th chunk.
    ``documents``: their numbers in this order."""

    token_Bn: Tensor
    real_Bn: Tensor
    slot_S: Tensor
    steps: tuple[int, ...]
    documents: tuple[int, ...]


def chunks_of(lengths: tuple[int, ...], size: int, device: torch.device) -> Chunks:
    starts = (0, *accumulate(lengths))
    longest_first = sorted((number for number, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
    documents = tuple(longest_first)
    steps, firsts, counts = [], [], []
    done = 0
    while longest_first:
        steps.append(len(longest_first))
        firsts += [starts[number] + done for number in longest_first]
        counts += [min(size, lengths[number] - done) for number in longest_first]
        done += size
        longest_first = [number for number in longest_first if lengths[number] > done]
    # In the order of their tokens: how far each chunk's slots are from its tokens.
    places = sorted(range(len(firsts)), key=firsts.__getitem__)
    shifts = torch.tensor([place * size - firsts[place] for place in places], device=device)
    repeats = torch.tensor([counts[place] for place in places], device=device)
    shift_S = shifts.repeat_interleave(repeats, output_size=starts[-1])
    inside_n = torch.arange(size, device=device)
    token_Bn = torch.tensor(firsts, device=device)[:, None] + inside_n
    real_Bn = inside_n < torch.tensor(counts, device=device)[:, None]
    slot_S = shift_S + torch.arange(starts[-1], device=device)
    return Chunks(token_Bn.clamp(max=starts[-1] - 1), real_Bn, slot_S, tuple(steps), documents)


def _in_chunks(x_SX: Tensor, chunks: Chunks) -> Tensor:
    """[B, X, n, ...] from [S, X, ...]."""
    return x_SX[chunks.token_Bn].transpose(1, 2)


def _unit(x_SJC: Tensor) -> Tensor:
    """Every row divided by its length."""
    wide = upcast(x_SJC)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)


def causal_conv(x_SX: Tensor, weight_XY: Tensor, positions_S: Tensor) -> Tensor:
    """out[s] = sum over b of weight[:, Y - 1 - b] * x[s - b]: each channel by itself, over the last Y tokens of the
    document. In at least float32."""
    wide, taps = upcast(x_SX), upcast(weight_XY)
    out = wide * taps[:, -1]
    for back in range(1, taps.shape[1]):
        earlier = F.pad(wide, (0, 0, back, 0))[: len(wide)]
        out = out + earlier.masked_fill((positions_S < back)[:, None], 0.0) * taps[:, -1 - back]
    return out


def conv_step(rows_BYX: Tensor, weight_XY: Tensor) -> Tensor:
    """[B, X]: the same for one token of each document, given the last Y inputs of it."""
    return (upcast(rows_BYX) * upcast(weight_XY).T).sum(1)


def last_inputs(x_SX: Tensor, lengths: tuple[int, ...], count: int) -> Tensor:
    """[B, count, X]: the last rows of each document, zeros before its first."""
    lengths_B = torch.tensor(lengths, device=x_SX.device)
    back_Y = torch.arange(-count, 0, device=x_SX.device)
    row_BY = lengths_B.cumsum(0)[:, None] + back_Y
    return x_SX[row_BY.clamp(min=0)].masked_fill((lengths_B[:, None] + back_Y < 0)[..., None], 0.0)


def recompute_in_backward(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``run(*inputs)``, which saves its inputs alone: its many intermediates are made again in the backward pass.

    ``run`` must not hold tensors that need a gradient, and takes no collective.
    """
    out: Tensor = _Recomputed.apply(run, *inputs)
    return out


class _Context(Protocol):
    run: Callable[..., Tensor]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        # A microbatch without tokens uses none of them.
        grads = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True))
        return None, *(next(grads) if need else None for need in needed)
