"""The planner on this very machine: calibrate, then predict the step time of twelve layouts, then measure them.

`pytest -m nightly tests/ranks/test_plan_cpu.py -s` prints the table. Other programs disturb both sides. Every timed
step stands between two references, one small product on all ranks at once, and is worth its ratio to them times what
the reference took on as many ranks in the calibration. That takes out changes of speed; it does not take out what a
busy neighbour does to ranks that wait for each other, so measure when nobody else computes.
"""

from __future__ import annotations

import pytest
from tests.timed_steps import LAYOUTS, time_steps

from moefold.bench.calibrate import calibrate
from moefold.hardware.cluster import cluster_of_machine
from moefold.plan.published.assess import spearman
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import workload_of_run
from moefold.tables import text_table

LARGEST_ERROR = 0.20
SMALLEST_RANKING = 0.8


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_step_times_of_twelve_layouts() -> None:
    machine = calibrate(world=4).machine
    references = {crowd.ranks: crowd.reference_us * 1e-6 for crowd in machine.crowds}
    rows, measured, predicted = [], [], []
    for layout in LAYOUTS:
        taken = time_steps(layout)
        workload = workload_of_run(layout.run, cluster_of_machine(machine, layout.world), taken.imbalance)
        predicted.append(predict_time(workload).step_seconds)
        measured.append(taken.references * references[layout.world])
        error = predicted[-1] / measured[-1] - 1
        slower = taken.seconds / measured[-1]
        rows.append(
            (
                layout.name,
                f"{predicted[-1]:.2f} s",
                f"{measured[-1]:.2f} s",
                f"{100 * error:+.0f} %",
                f"{taken.seconds:.2f} s",
                f"{slower:.2f}",
                f"{taken.imbalance:.2f}",
            )
        )
    header = ("layout", "predicted", "measured", "error", "as timed", "machine then", "imbalance")
    ranking = spearman(predicted, measured)
    print("\n" + text_table(header, rows) + f"\nSpearman {ranking:.2f}")
    errors = {row[0]: there / here - 1 for row, there, here in zip(rows, predicted, measured)}
    too_large = {name: round(error, 2) for name, error in errors.items() if abs(error) > LARGEST_ERROR}
    assert not too_large and ranking >= SMALLEST_RANKING
