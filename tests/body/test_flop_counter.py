"""The executed FLOP count equals what torch's counter sees, exactly, at proxy size.

torch has no formula for the CPU's fused attention and grouped GEMM, and would silently miss most of the arithmetic; the
formulas are registered here. Backward attention is five products: scores again, and one for each of probabilities,
values, queries and keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from torch.utils.flop_counter import FlopCounterMode

from moefold.blueprint.flops import executed_flops_per_token
from moefold.config.attention import GatedDeltaNetConfig
from moefold.config.model import ModelConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.nn.batch import mtp_targets
from moefold.recipes.catalog import recipe

aten = torch.ops.aten
SEQ_LEN, SEQUENCES = 64, 2


def _grouped(a: Any, b: Any, *rest: Any, **kwargs: Any) -> int:
    """Rows by expert times matrices, or (for weight gradients) columns by expert times rows by expert."""
    assert len(a) == 2
    return 2 * a[0] * a[1] * b[-1]


def _attention(q: Any, k: Any, v: Any, *rest: Any, **kwargs: Any) -> int:
    sequences, heads, queries, dim = q
    return 2 * sequences * heads * queries * k[2] * (dim + v[-1])


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, **kwargs: Any) -> int:
    sequences, heads, queries, dim = q
    return 2 * sequences * heads * queries * k[2] * (3 * dim + 2 * v[-1])


FORMULAS = {
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@pytest.mark.parametrize(
    "name", ["deepseek_v3_proxy", "qwen3_30b_a3b_proxy", "mixtral_8x7b_proxy", "gpt_oss_20b_proxy"]
)
@pytest.mark.parametrize("experts", ["grouped", "sequential"])
@pytest.mark.parametrize("num_mtp", [0, 2])
def test_executed_count_equals_the_counter(name: str, experts: str, num_mtp: int) -> None:
    compare(replace(recipe(name).model, num_mtp=num_mtp), experts)


@pytest.mark.parametrize("chunk", [16, 64])
def test_executed_count_of_linear_attention_equals_the_counter(chunk: int) -> None:
    linear = GatedDeltaNetConfig(2, 4, 8, 12, full_attention_every=2, chunk_size=chunk)
    model = recipe("qwen3_30b_a3b_proxy").model
    gated = replace(model.attention, output_gate=True)
    compare(replace(model, num_layers=4, linear_attention=linear, attention=gated), "grouped")


def compare(model: ModelConfig, experts: str) -> None:
    num_mtp = model.num_mtp
    decoder = build_decoder(model, torch.float32, local_interfaces(experts))  # type: ignore[arg-type]
    fill(decoder)
    batch = batch_of(SEQUENCES, SEQ_LEN, model.vocab_size)
    ahead = [mtp_targets(batch.tokens_S, batch.labels_S, batch.lengths, by) for by in range(1, num_mtp + 1)]
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        output = decoder(replace(batch, ahead=tuple(ahead)), None)
        (output.loss_sum + sum(output.ahead_loss_sums)).backward()
    counted = counter.get_total_flops() / (SEQUENCES * SEQ_LEN)
    assert executed_flops_per_token(model, SEQ_LEN).total == pytest.approx(counted, rel=1e-9)
