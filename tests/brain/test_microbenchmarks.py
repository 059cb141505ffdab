"""Single operations beside the planner's rates: what is compared with what, on measurements made up here."""

from __future__ import annotations

import pytest

from benchmarks.microbenchmarks import Measurement, compared, rows, workload_on
from moefold.plan.op_costs import attention_tails, roofline
from moefold.plan.op_sizes import sizes_of
from moefold.plan.timing.constants import CURRENT
from moefold.plan.timing.throughput import rates_of

WORKLOAD = workload_on("B200")
RATES, SIZES = rates_of(WORKLOAD, CURRENT, 4096.0), sizes_of(WORKLOAD)


def matmul(rate: float, **sides: int) -> Measurement:
    """Measured at so many times the planner's rate for this shape: operands and result are in bfloat16."""
    shape = {"m": 4096, "n": 4096, "k": 4096} | sides
    m, n, k = shape["m"], shape["n"], shape["k"]
    flops = 2.0 * m * n * k
    seconds = RATES.gemm * roofline(flops, 2.0 * (m * k + k * n + m * n), SIZES)
    return {"kind": "gemm", "gpu": "B200", "dtype": "bf16", "tflops": rate * flops / seconds / 1e12, "shape": shape}


def experts(rows: int) -> Measurement:
    """The grouped GEMM of 8 experts, at the planner's rate for matmuls that fill tiles and wait for no bytes."""
    shape = {"ng": 8, "M": rows, "N": 65536, "K": 65536, "stage": "fwd", "accumulate": "False"}
    return {"kind": "grouped_gemm", "gpu": "B200", "dtype": "bf16", "tflops": 1 / RATES.grouped / 1e12, "shape": shape}


def test_what_was_measured_slower_is_predicted_too_fast() -> None:
    fast, slow = compared(matmul(2.0)), compared(matmul(0.5, k=64))
    assert fast is not None and fast.error == pytest.approx(1.0) and "at least 512" in fast.kind
    assert slow is not None and slow.error == pytest.approx(-0.5) and "below 512" in slow.kind


def test_rows_of_an_expert_fill_whole_tiles() -> None:
    full, third = compared(experts(64 * SIZES.tile)), compared(experts(64 * SIZES.tile // 3))
    assert full is not None and full.error == pytest.approx(0, abs=1e-3) and "at least 512" in full.kind
    one_more = compared(experts(SIZES.tile + 1))
    assert one_more is not None and third is not None
    assert one_more.error > 0.9 > third.error and "under 512" in one_more.kind


def test_attention_was_counted_over_the_whole_square() -> None:
    shape = {"batch": 1, "seq_len": 4096, "head_num": 128}
    whole = {"kind": "sdpa_fwd", "gpu": "B200", "dtype": "bf16", "shape": shape}
    forward, _ = attention_tails(128.0 * 4096, SIZES)
    found = compared(whole | {"tflops": 2 / forward / RATES.attention_forward / 1e12})
    assert found is not None and found.error == pytest.approx(0.0)
    # A quarter of the heads at the same rate: slower than that is expected.
    few = compared(whole | {"shape": shape | {"head_num": 32}, "tflops": 2 / forward / RATES.attention_forward / 1e12})
    assert few is not None and few.error > 0.3


@pytest.mark.parametrize(("sums", "bytes_each"), [("fp32", 8.0), ("bf16", 4.0)])
def test_gradients_are_added_up_in_the_format_of_the_main_gradients(sums: str, bytes_each: float) -> None:
    """Of experts with so few rows that nothing else takes time."""
    shape = {"ng": 256, "M": 1, "N": 4096, "K": 4096, "stage": "bwd_grad_w", "accumulate": "True"}
    seconds = RATES.grouped * SIZES.balance * bytes_each * 256 * 4096**2
    rate = 2.0 * 256 * 4096**2 / seconds / 1e12
    found = compared(
        {
            "kind": "grouped_gemm",
            "gpu": "B200",
            "dtype": "bf16",
            "tflops": rate,
            "shape": shape | {"main_grad_dtype": sums},
        }
    )
    assert found is not None and found.error == pytest.approx(0.0, abs=0.02)


def test_exchanges_are_those_of_the_layer_that_was_measured() -> None:
    exchange = {"kind": "ep_comm", "gpu": "GB200", "experts": 256, "time_us": 600.0}
    plain, fused = (compared(exchange | {"ep": 32, "backend": name}) for name in ("alltoall", "hybridep"))
    assert plain is not None and fused is not None and "inside of a domain" in plain.kind
    # Rows travel once per rank and not once per choice.
    assert fused.error < plain.error


def test_what_does_not_say_its_size_is_left_out() -> None:
    assert compared({"kind": "ep_comm", "gpu": "H800", "algbw_gbs": 153}) is None
    assert compared({"kind": "effect", "what": "binding"}) is None


def test_the_table_ends_with_all_of_them() -> None:
    *_, last = rows([matmul(1.0), matmul(1.25), matmul(0.8)])
    assert last[0] == "all" and last[2] == "3" and last[4] == "20%"
