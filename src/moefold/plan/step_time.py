"""How long a step takes. (A first rough form: a fixed share of the peak. The real one follows.)"""

from __future__ import annotations

from moefold.plan.job import Job
from moefold.plan.prediction import TimeLine, TimePrediction


def predict_time(job: Job) -> TimePrediction:
    flops = 6.0 * 3e9 * job.global_tokens / job.cluster.num_gpus
    seconds = flops / (0.4 * job.cluster.gpu.bf16_tflops * 1e12)
    lines = (
        TimeLine("compute", "products", seconds * 0.6),
        TimeLine("communication", "experts' exchanges", seconds * 0.5, hidden=seconds * 0.3),
        TimeLine("bubble", "waiting for stages", seconds * 0.2),
    )
    return TimePrediction(seconds, 0.8 * seconds, 1.2 * seconds, lines)
