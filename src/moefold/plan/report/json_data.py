"""A proposal as plain data, for `--json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moefold.checks.kernels import kernels_in_use
from moefold.plan.memory.saving_steps import savings_of
from moefold.plan.prediction import Prediction
from moefold.plan.search.proposal import Proposal
from moefold.plan.search.search import Candidate, described
from moefold.plan.search.what_if import Answer
from moefold.plan.workload import Workload


def proposal_data(proposal: Proposal) -> dict[str, Any]:
    question, result = proposal.question, proposal.result
    return {
        "run": question.name,
        "gpu": question.cluster.gpu.name,
        "gpus": question.cluster.num_gpus,
        "domain": question.cluster.domain,
        "nic_gb_s": question.cluster.nic_gb_s,
        "framework": question.framework,
        "chosen": prediction_data(proposal.chosen),
        "runner_up": prediction_data(proposal.runner_up) if proposal.runner_up else None,
        "own": prediction_data(proposal.own) if proposal.own else None,
        "own_problem": proposal.own_problem,
        "why": list(proposal.reasons),
        "what_if": [_answer_data(answer, proposal.chosen) for answer in proposal.answers],
        "switched_on": [asdict(each) | {"entries": sorted(each.entries)} for each in proposal.switched_on],
        "would_free": [asdict(each) for each in proposal.freed],
        "pareto": [_candidate_data(each) for each in result.pareto] if result else [],
        "searched": {
            "layouts": result.num_layouts,
            "memory_predictions": result.num_memory,
            "time_predictions": result.num_time,
            "seconds": result.wall_seconds,
        }
        if result
        else None,
        "goodput": asdict(proposal.goodput) | {"tokens": question.tokens, "days": proposal.days},
        "command": " ".join(proposal.command),
        "beyond_moefold": list(proposal.beyond),
    }


def prediction_data(prediction: Prediction) -> dict[str, Any]:
    memory, time = prediction.memory, prediction.time
    return {
        "layout": layout_data(prediction.workload),
        "step_seconds": time.step_seconds,
        "interval": [time.low, time.high],
        "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
        "tflops_per_gpu": prediction.tflops_per_gpu,
        "mfu": prediction.mfu,
        "wall": prediction.wall,
        "time": [
            {"wall": line.wall, "name": line.name, "seconds": line.seconds, "hidden": line.hidden, "why": line.why}
            for line in time.lines
        ],
        "memory_bytes": memory.total,
        "capacity_bytes": memory.capacity,
        "fits": memory.fits,
        "fullest_pipeline_rank": memory.pipeline_rank,
        "memory_by_rank": list(memory.by_rank),
        "memory": [
            {"group": line.group, "name": line.name, "bytes": line.bytes, "why": line.why} for line in memory.lines
        ],
        "notes": list(prediction.notes),
    }


def layout_data(workload: Workload) -> dict[str, Any]:
    parallel = workload.parallel
    return {axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp", "vpp", "ep", "etp")} | {
        "dp": workload.dp,
        "schedule": parallel.schedule,
        "stages": parallel.stages,
        "sharding": parallel.sharding,
        "replicate": parallel.dp_replicate,
        "edp": workload.edp,
        "micro_batch": workload.run.data.micro_batch,
        "microbatches": workload.microbatches,
        "global_batch": workload.run.data.micro_batch * workload.microbatches * workload.dp,
        "seq_len": workload.run.data.seq_len,
        "format": workload.format,
        "framework": workload.framework.name,
        "dispatcher": workload.dispatcher,
        "ep_overlap": workload.ep_overlap,
        "delay_wgrad": workload.delay_wgrad,
        "recompute": sorted(workload.recompute),
        "savings": sorted(savings_of(workload.run)) if workload.is_own else [],
        "graphs": workload.run.kernels.graphs,
        "kernels": kernels_in_use(workload.run, "cuda") if workload.is_own else None,
    }


def _candidate_data(candidate: Candidate) -> dict[str, Any]:
    return {
        "choice": described(candidate.choice),
        "layout": layout_data(candidate.workload),
        "step_seconds": candidate.seconds,
        "memory_bytes": candidate.bytes,
    }


def _answer_data(answer: Answer, chosen: Prediction) -> dict[str, Any]:
    found = answer.prediction
    return {
        "if": answer.question,
        "about": answer.about,
        "step_seconds": found.time.step_seconds if found else None,
        "faster_by": answer.faster(chosen) if found else None,
        "memory_bytes": found.memory.total if found else None,
        "fits": found.memory.fits if found else None,
        "wall": found.wall if found else None,
        "not_legal": answer.reason,
    }
