"""One job's prediction: memory and time together, and the wall that binds."""

from __future__ import annotations

from moefold.plan.job import Job
from moefold.plan.memory import predict_memory
from moefold.plan.prediction import Prediction, TimePrediction, Wall
from moefold.plan.step_time import predict_time


def predict(job: Job) -> Prediction:
    memory, time = predict_memory(job), predict_time(job)
    rate = job.global_tokens / job.cluster.num_gpus / time.step_seconds
    wall: Wall = binding_wall(time) if memory.fits else "memory"
    return Prediction(job, memory, time, wall, rate, 0.0, 0.0)


def binding_wall(time: TimePrediction) -> Wall:
    """The dearest of what is exposed."""
    costs: dict[Wall, float] = {
        "compute": time.of("compute"),
        "communication": time.of("communication"),
        "host": time.of("host"),
    }
    return max(costs, key=costs.__getitem__)
