"""Run laboratory cases in a process of their own, where the fake CUDA guard can be loaded before torch.

    python -m tests.gpu_lab.run_cases NAME...            cases of lab_cases.py
    python -m tests.gpu_lab.run_cases --faults NAME...   faults of lab_faults.py, each with its case

prints one JSON object for each: the findings, and how many kernels and calls of torch.distributed the ranks made.
"""

from __future__ import annotations

import json
import os
import sys

from moefold.dryrun.fake_cuda.load_guard import load_guard


def main(names: list[str], faults: bool) -> None:
    load_guard()
    from tests.gpu_lab.lab_cases import CASES, LabCase
    from tests.gpu_lab.lab_faults import FAULTS

    from moefold.api.runs import load_run
    from moefold.dryrun.fake_cuda.laboratory import LabRun, compare, run_ranks_of_each

    def lab_run(case: LabCase) -> LabRun:
        return LabRun(load_run(case.recipe, case.changes), case.world, case.microbatches)

    if faults:
        found = []
        for name in names:
            with FAULTS[name].seed():
                found += run_ranks_of_each([lab_run(FAULTS[name].case)])
    else:
        found = run_ranks_of_each([lab_run(CASES[name]) for name in names])
    for name, reports in zip(names, found, strict=True):
        data = {
            "name": name,
            "findings": [[finding.kind, str(finding)] for finding in compare(reports)],
            "launches": sum(report.num_launches for report in reports),
            "calls": sum(len(report.calls) for report in reports),
        }
        print(json.dumps(data), flush=True)


if __name__ == "__main__":
    asked = sys.argv[1:]
    main([name for name in asked if name != "--faults"], "--faults" in asked)
    sys.stdout.flush()
    # torch's threads for backward passes on eight devices do not end by themselves.
    os._exit(0)
