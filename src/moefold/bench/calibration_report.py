"""A calibration, for the reader."""

from __future__ import annotations

from moefold.bench.calibrate import Calibration
from moefold.tables import text_table
from moefold.units import format_bytes, format_seconds


def calibration_report(found: Calibration) -> str:
    machine = found.machine
    rates = [
        ("products", f"{machine.gemm_gflops:.0f} GFLOP/s", f"and {machine.gemm_gb_s:.1f} GB/s to fetch operands"),
        ("experts' products", f"{100 * machine.grouped:.0f} %", "of one product's rate"),
        ("attention forward", f"{machine.attention_forward_gflops:.0f} GFLOP/s", ""),
        ("attention backward", f"{machine.attention_backward_gflops:.0f} GFLOP/s", ""),
        ("memory traffic", f"{machine.traffic_gb_s:.1f} GB/s", "of the bytes that must move"),
        ("an operation", f"{machine.operation_us:.0f} us", "beside its bytes"),
        ("an expert", f"{machine.expert_us:.0f} us", "of a loop over experts"),
        ("the update", f"{machine.update_ns:.1f} ns", "per parameter"),
    ]
    crowds = [
        (str(crowd.ranks), f"{crowd.slowdown:.2f}", f"{crowd.reference_us / 1e3:.2f} ms") for crowd in machine.crowds
    ]
    wires = [
        (
            wire.operation,
            f"{wire.group} of {wire.world}",
            f"{format_bytes(wire.received[0])}: {format_seconds(wire.us[0] * 1e-6)}",
            f"{format_bytes(wire.received[-1])}: {format_seconds(wire.us[-1] * 1e-6)}",
        )
        for wire in machine.wires
    ]
    errors = [(name, f"{100 * error:+.0f} %") for name, error in found.errors.items()]
    return "\n\n".join(
        (
            machine.name,
            text_table(("one rank alone", "rate", ""), rates),
            text_table(("ranks at once", "times longer", "reference"), crowds),
            text_table(("messages", "ranks", "small", "large"), wires),
            text_table(("small runs", "the table's error"), errors),
        )
    )
