"""One workload's prediction: memory and time together, and the wall that binds."""

from __future__ import annotations

from moefold.blueprint.flops import training_flops
from moefold.blueprint.narrow_bytes import matmul_bits
from moefold.plan.memory.peak import predict_memory
from moefold.plan.prediction import Prediction, TimePrediction, Wall
from moefold.plan.timing.constants import CURRENT, Constants
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import Workload

# Shares of the step from which what is not computation is called the wall. Computation is there in every step, so it
# binds where nothing else stands out.
COMMUNICATION_BINDS = 0.25
HOST_BINDS = 0.15


def predict(workload: Workload, constants: Constants = CURRENT) -> Prediction:
    memory, time = predict_memory(workload), predict_time(workload, constants)
    rate = workload.global_tokens / workload.cluster.num_gpus / time.step_seconds
    flops = rate * training_flops(workload.model, workload.run.data.seq_len)
    wall: Wall = binding_wall(time) if memory.fits else "memory"
    return Prediction(
        workload,
        memory,
        time,
        wall,
        rate,
        flops / 1e12,
        workload.cluster.gpu.matmul_units(matmul_bits(workload.casts)),
    )


def binding_wall(time: TimePrediction) -> Wall:
    """What to work on first: exposed communication, the host, or the computation itself."""
    return wall_of_shares(time.of("communication") / time.step_seconds, time.of("host") / time.step_seconds)


def wall_of_shares(communication: float, host: float) -> Wall:
    """The same from fractions of a step, predicted or measured."""
    if communication >= COMMUNICATION_BINDS and communication >= host:
        return "communication"
    return "host" if host >= HOST_BINDS else "compute"
