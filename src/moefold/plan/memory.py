"""What a rank holds. (A first rough form; the real one follows.)"""

from __future__ import annotations

from moefold.plan.job import Job
from moefold.plan.prediction import MemoryLine, MemoryPrediction


def predict_memory(job: Job) -> MemoryPrediction:
    lines = (MemoryLine("weights", "parameters", 20e9), MemoryLine("activations", "all", 20e9))
    return MemoryPrediction(lines, job.cluster.gpu.memory_bytes)
