"""The planner's shares of recomputed matmuls against torch's own selective checkpointing, with torchtitan's rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from moefold.blueprint.model_shape import Attention, Dense, Layer
from moefold.plan.timing.operator_recompute import operator_shares

_DIM, _HEADS, _KV_HEADS, _HEAD, _HIDDEN, _TOKENS = 64, 8, 2, 8, 192, 16


class Block(nn.Module):
    """As torchtitan's Llama calls its matmuls. What attention does between them is none of these."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": _HEADS, "k": _KV_HEADS, "v": _KV_HEADS}
        self.inward = nn.ModuleDict({name: nn.Linear(_DIM, n * _HEAD, bias=False) for name, n in sizes.items()})
        self.out = nn.Linear(_HEADS * _HEAD, _DIM, bias=False)
        self.gate, self.up = (nn.Linear(_DIM, _HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(_HIDDEN, _DIM, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        q_TE, k_TF, v_TF = (self.inward[name](x_TD) for name in ("q", "k", "v"))
        x_TD = x_TD + self.out(q_TE * torch.cat([k_TF * v_TF] * (_HEADS // _KV_HEADS), dim=1))
        out: Tensor = x_TD + self.down(F.silu(self.gate(x_TD)) * self.up(x_TD))
        return out


def _contexts() -> Any:
    calls = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator == torch.ops.aten.mm.default:
            calls[context.is_recompute] += 1
            if calls[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _matmuls(recomputing: bool) -> int:
    """FLOPs of forward and backward."""
    torch.manual_seed(0)
    block, x_TD = Block(), torch.randn(_TOKENS, _DIM, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        if recomputing:
            out = checkpoint(block, x_TD, use_reentrant=False, context_fn=_contexts, early_stop=False)
        else:
            out = block(x_TD)
        out.sum().backward()
    return int(counter.get_flop_counts()["Global"][torch.ops.aten.mm])


def test_recomputed_matmuls_are_those_that_torch_repeats() -> None:
    repeated = _matmuls(recomputing=True) - _matmuls(recomputing=False)
    attention = Attention(heads=_HEADS, kv_heads=_KV_HEADS, qk_dim=_HEAD, v_dim=_HEAD)
    shares = operator_shares(Layer(attention, Dense(_HIDDEN)), _DIM, all_matmuls=False)
    sizes = {
        "qkv": _DIM * (_HEADS + 2 * _KV_HEADS) * _HEAD,
        "attention_out": _HEADS * _HEAD * _DIM,
        "feed_forward": 3 * _DIM * _HIDDEN,
    }
    assert repeated == 2 * _TOKENS * sum(shares.get(part, 0.0) * size for part, size in sizes.items())
