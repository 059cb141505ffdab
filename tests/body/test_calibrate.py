"""Calibration: the fits, a clock that knows how busy the machine is, and one tiny calibration from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moefold.bench.calibrate import matmul_costs, smallest_errors, wires_of
from moefold.bench.clock import ratios, seconds
from moefold.bench.single_rank import DENSE, DOCUMENTS, MESSAGES, PARAMETERS, REPETITIONS, TOKENS
from moefold.blueprint.model_shape import Dense, Layer
from moefold.cli.main import main
from moefold.hardware.machine import read_machine
from moefold.plan.op_costs import parts_of
from moefold.plan.op_sizes import Sizes


def test_rates_are_found_from_exact_times() -> None:
    flops, moved = [1e9, 2e9, 5e8], [1e6, 4e6, 8e6]
    times = [a * 1e-11 + b * 2e-10 for a, b in zip(flops, moved)]
    assert smallest_errors((flops, moved), times) == pytest.approx([1e-11, 2e-10])


def test_no_rate_is_negative() -> None:
    """Times that fall with the bytes are explained by arithmetic alone."""
    found = smallest_errors(([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]), [1.0, 2.2, 3.5])
    assert found[0] > 0 and found[1] == 0


def test_products_are_fitted_to_the_planners_own_counts() -> None:
    times = {}
    for number, shape in enumerate(DENSE):
        sizes = Sizes(
            dim=shape.dim,
            seq_len=shape.tokens,
            tokens=shape.tokens,
            tp=1,
            ep=1,
            etp=1,
            imbalance=1.0,
            narrow=False,
            operand_bytes=4.0,
            gradient_bytes=4.0,
            fused=False,
            exact=True,
            biases_apart=False,
            fused_experts=False,
            flash=True,
            balance=20.0,
            word=4.0,
            tile=1,
            sharpness=1.0,
        )
        part = next(part for part in parts_of(Layer(None, Dense(shape.hidden)), sizes) if part.name == "feed_forward")
        times |= {
            f"dense {number} forward": part.forward.gemm_flops * 1e-11,
            f"dense {number} backward": part.backward.gemm_flops * 1e-11,
        }
    # 20 FLOPs per byte: a byte takes twenty times as long.
    assert matmul_costs(times) == pytest.approx((1e-11, 2e-10))


def test_messages_are_freed_from_the_work_between_them() -> None:
    times = {"work 2": 4e-3}
    names = [("tokens", MESSAGES), ("send", MESSAGES), ("sum", MESSAGES), ("parameters", PARAMETERS)]
    for name, sizes in names:
        times |= {f"{name} 2 {size}": 4e-3 + REPETITIONS * (1e-3 + size * 1e-9) for size in sizes}
    times |= {f"passes 2 {size}": 4e-3 + REPETITIONS * (5e-3 + size * 4e-9) for size in PARAMETERS}
    for name, amounts in (("exchange", TOKENS), ("context", DOCUMENTS)):
        times |= {f"{name} 2 {amount}": 4e-3 + REPETITIONS * 3e-3 for amount in amounts}
        times |= {f"one {name} 2 {amount}": 4e-3 + REPETITIONS * 1e-3 for amount in amounts}
    us = {wire.operation: wire.us for wire in wires_of(times, 2, 2)}
    assert us["send"] == pytest.approx([1e3 + size * 1e-3 for size in MESSAGES])
    assert us["tokens"][0] == pytest.approx(us["send"][0] / 2)
    assert us["gradients"] == pytest.approx([3e3 + 2e-3 * size for size in PARAMETERS])
    assert us["exchange"] == us["context"] == pytest.approx((2e3, 2e3))


def test_trials_are_worth_their_ratio_to_the_reference() -> None:
    import torch

    a, b = torch.randn(512, 512), torch.randn(512, 512)

    def four() -> None:
        for _ in range(4):
            a @ b

    found = ratios({"four": four, "nothing": lambda: None}, rounds=7)
    assert found["four"] == pytest.approx(4.0, rel=0.5) and found["nothing"] < 0.2
    assert seconds(four) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_calibration_is_a_table_that_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    assert main(["bench", "calibrate", "--world", "2", "--rounds", "1", "--out", str(path)]) == 0
    assert "one rank " in capsys.readouterr().out
    machine = read_machine(path)
    assert 1 < machine.gemm_gflops < 10_000 and [crowd.ranks for crowd in machine.crowds] == [1, 2]
    words = [
        "plan",
        "debug_small",
        "--machine",
        str(path),
        "--gpus",
        "2",
        "--parallel.ep",
        "2",
        "--no-search",
        "--json",
    ]
    assert main(words) == 0
    assert 0 < json.loads(capsys.readouterr().out)["chosen"]["step_seconds"] < 60
