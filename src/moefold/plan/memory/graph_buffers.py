"""Memory that captured phases (`kernels.graphs`) need beside what they save: fixed places for what enters and leaves.

A region (`schedule/graph_regions.py`) has, in every slot of its stage, memory of its own for its inputs, for the
gradients of its outputs and for the gradients of its inputs. An input that lies in another graph of the slot is read
there; a gradient that only passes through is not copied. Per layer and slot, with t tokens, D the model's dim, L the
dim in which rows travel, K experts per token, X rows of all pairs and Y rows received (`blueprint/row_bounds.py`), a
word of b bytes and a prob of p:

    attention                     3 t D b                                input, gradient of the output, of the input
    attention, feed_forward       3 t D b
    attention, route              t (4 D + L) b + t K p                  outputs: residual, norm, the norm's rows, probs
    route                         t (3 D + L) b + t K p                  its input may be attention's output, eager
    dispatch_prepare              t (2 D + L) b + t K p + X (L b + p)    gradients of rows and probs, and of tokens
    dispatch_finish .. prepare    t D b + Y (3 L b + 2 p)                rows in, their gradients, and those of outputs
                                  + 2 t D b with a shared expert
    combine_finish, output        t D b + 2 X L b                        rows in, and their gradients

The input of a layer that is the output of another graph, as where the whole layer before it is captured, is read there:
t D b less.

Slots are as many as microbatches in flight, so what is saved is what is saved without graphs. Where a rank has several
stages they do not all hold most at the same time, but graphs keep their memory: the difference is a line of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moefold.blueprint.model_shape import MoE
from moefold.blueprint.row_bounds import bounds_rows, row_bounds
from moefold.config.precision import BYTES
from moefold.config.run import RunConfig
from moefold.plan.memory.in_flight import Moment
from moefold.plan.prediction import MemoryLine
from moefold.plan.stage_contents import StageContents
from moefold.plan.workload import Workload
from moefold.schedule.graph_regions import DENSE_PHASES, MOE_PHASES, captured_phases, regions


class GraphSizes(NamedTuple):
    """Of one microbatch of a rank: tokens, dims, bytes of a word and of a prob, rows of pairs and rows received."""

    tokens: int
    dim: int
    travel: int
    top_k: int
    word: int
    prob: int
    shared: bool
    pair_rows: int
    received_rows: int


def graph_sizes(run: RunConfig, tokens: int) -> GraphSizes:
    moe, parallel, word = run.model.moe, run.parallel, BYTES[run.precision.compute]
    if moe is None:
        return GraphSizes(tokens, run.model.dim, run.model.dim, 0, word, word, False, 0, 0)
    pairs = row_bounds(run, tokens).pair * parallel.ep if bounds_rows(run) else 0
    prob = max(4, word) if moe.router.fp32 else word
    return GraphSizes(
        tokens,
        run.model.dim,
        moe.latent_dim or run.model.dim,
        moe.top_k,
        word,
        prob,
        bool(moe.shared_hidden_dim),
        pairs,
        pairs * parallel.etp,
    )


def static_bytes(region: Sequence[str], s: GraphSizes) -> int:
    """Of one region in one slot."""
    token, row, probs = s.dim * s.word, s.travel * s.word, s.top_k * s.prob
    if region[0] == "dispatch_prepare":
        return s.tokens * (2 * token + row + probs) + s.pair_rows * (row + s.prob)
    if region[0] == "dispatch_finish":
        return s.tokens * token * (3 if s.shared else 1) + s.received_rows * (3 * row + 2 * s.prob)
    if region[0] == "combine_finish":
        return s.tokens * token + 2 * s.pair_rows * row
    if "route" in region:
        return s.tokens * ((4 if "attention" in region else 3) * token + row + probs)
    return 3 * s.tokens * token


def stage_static_bytes(run: RunConfig, layers: Sequence[bool], modules: Sequence[bool], tokens: int) -> int:
    """Of one slot of a stage: whether each of its layers is an MoE layer, and each of its MTP modules."""
    sizes, captured = graph_sizes(run, tokens), captured_phases(run.kernels.graph_scope)
    total, is_output_captured = 0, False
    for number, is_moe in enumerate((*layers, *modules)):
        phases = MOE_PHASES if is_moe else DENSE_PHASES
        total += sum(static_bytes(region, sizes) for region in regions(phases, captured))
        # Between an MTP module and what is before it lies more than a layer's output.
        if is_output_captured and "attention" in captured and number < len(layers):
            total -= sizes.tokens * sizes.dim * sizes.word
        is_output_captured = phases[-1] in captured
    return total


def graph_lines(
    workload: Workload,
    stages: Sequence[StageContents],
    stage_bytes: Sequence[float],
    fullest: Moment,
    moments: Sequence[Moment],
) -> list[MemoryLine]:
    """``stage_bytes``: what a microbatch keeps of each stage; ``moments``: all that a rank comes to, of which
    ``fullest`` counts."""
    if not workload.is_own or workload.run.kernels.graphs != "partial":
        return []
    slots = [max(moment[number] for moment in moments) for number in range(len(stages))]
    static = 0
    for count, stage in zip(slots, stages):
        layers = [isinstance(layer.feed, MoE) for layer, number in stage.layers for _ in range(number)]
        modules = [isinstance(workload.model.mtp_layers[-1].feed, MoE)] * stage.mtp if stage.mtp else []
        static += count * stage_static_bytes(workload.run, layers, modules, round(workload.context_tokens))
    why = f"inputs and gradients of captured phases, in {', '.join(map(str, slots))} slots per stage"
    lines = [MemoryLine("buffers", "static buffers of graphs", static, why)]
    idle = sum((count - live) * each for count, live, each in zip(slots, fullest, stage_bytes))
    if idle:
        why = "slots that hold no microbatch when most are held keep their memory; at most, if all phases are captured"
        lines.append(MemoryLine("activations", "idle slots of graphs", idle, why))
    return lines
