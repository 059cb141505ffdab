"""Plan in a loop: predict one model under many layouts, and plot which of them fit and which are fast.

Neither a GPU nor torch is needed: the planner is arithmetic.
"""

# %% The run, the cluster and the layouts.
import sys
import tempfile
from pathlib import Path

import moefold

GPUS = 64
EXPERT_PARALLEL = (2, 4, 8, 16, 32)
PIPELINE_PARALLEL = (1, 2, 4, 8)
run = moefold.load_run("qwen3_30b_a3b")

# %% One prediction per layout. `search=False` takes the layout as it is; a layout that is not legal raises.
plans: dict[tuple[int, int], moefold.Plan | str] = {}
for ep in EXPERT_PARALLEL:
    for pp in PIPELINE_PARALLEL:
        try:
            changed = moefold.load_run(run, {"parallel.ep": ep, "parallel.pp": pp})
            plans[ep, pp] = moefold.plan(changed, gpu="H100", gpus=GPUS, search=False)
        except moefold.MoefoldError as error:
            plans[ep, pp] = str(error).splitlines()[0]

legal = {key: plan for key, plan in plans.items() if not isinstance(plan, str)}
fitting = {key: plan for key, plan in legal.items() if plan.fits}
for (ep, pp), plan in legal.items():
    room = plan.memory_bytes / plan.capacity_bytes
    print(f"ep {ep:2d} pp {pp:2d}: {plan.step_seconds:6.2f} s, {room:5.0%} of the memory, limited by {plan.wall}")
best = min(fitting, key=lambda key: fitting[key].step_seconds)
print(f"best of these: ep {best[0]}, pp {best[1]}, {fitting[best].tflops_per_gpu:.0f} TFLOP/s per GPU")
print(fitting[best].reasons[0])

# %% Plot it: a table of squares in SVG. Dark is fast, hatched does not fit.
CELL, LEFT, TOP = 108, 90, 92


def square(ep: int, pp: int) -> str:
    x = LEFT + PIPELINE_PARALLEL.index(pp) * CELL
    y = TOP + EXPERT_PARALLEL.index(ep) * CELL
    plan = plans[ep, pp]
    if isinstance(plan, str):
        return text(x + CELL / 2, y + CELL / 2 + 4, "not legal", "#999", 12)
    if not plan.fits:
        share = plan.memory_bytes / plan.capacity_bytes
        body = f'<rect x="{x + 2}" y="{y + 2}" width="{CELL - 4}" height="{CELL - 4}" rx="8" fill="url(#hatch)"/>'
        return body + text(x + CELL / 2, y + CELL / 2 + 5, f"{share:.0%}", "#777", 15)
    speed = fitting[best].step_seconds / plan.step_seconds  # 1 for the best
    light = 88 - 56 * max(0.0, (speed - 0.3) / 0.7)
    edge = ' stroke="#d9541e" stroke-width="4"' if (ep, pp) == best else ""
    body = (
        f'<rect x="{x + 2}" y="{y + 2}" width="{CELL - 4}" height="{CELL - 4}" rx="8" fill="hsl(215 62% {light:.0f}%)"'
    )
    color = "#fff" if light < 62 else "#1c1b19"
    seconds = text(x + CELL / 2, y + CELL / 2, f"{plan.step_seconds:.1f} s", color, 18)
    return body + edge + "/>" + seconds + text(x + CELL / 2, y + CELL / 2 + 20, plan.wall, color, 12)


def text(x: float, y: float, words: str, color: str = "#1c1b19", size: int = 14, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


width, height = LEFT + CELL * len(PIPELINE_PARALLEL) + 20, TOP + CELL * len(EXPERT_PARALLEL) + 44
parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    'font-family="system-ui, sans-serif">',
    '<defs><pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="8" height="8" fill="#f1efe9"/><rect width="2" height="8" fill="#d8d4ca"/></pattern></defs>',
    f'<rect width="{width}" height="{height}" fill="#fffefb"/>',
    text(20, 32, f"{run.name}: step time on {GPUS} H100", size=18, anchor="start"),
    text(20, 54, "tp = 1; below the seconds: what limits the step", "#6b6862", 13, "start"),
    *(text(LEFT + (i + 0.5) * CELL, TOP - 10, f"pp {pp}") for i, pp in enumerate(PIPELINE_PARALLEL)),
    *(text(LEFT - 12, TOP + (i + 0.55) * CELL, f"ep {ep}", anchor="end") for i, ep in enumerate(EXPERT_PARALLEL)),
    *(square(ep, pp) for ep in EXPERT_PARALLEL for pp in PIPELINE_PARALLEL),
    text(20, height - 16, "hatched: does not fit, with the memory it would need", "#6b6862", 13, "start"),
    "</svg>",
]
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="moefold-example-"))
(folder / "layouts.svg").write_text("\n".join(parts))
print(f"wrote {folder / 'layouts.svg'}")

# %% The planner's own page about the best one: memory and time by cause, and what would change if ...
(folder / "best.html").write_text(fitting[best].html())
print(f"wrote {folder / 'best.html'}")
# Better than a loop: a search over all choices, schedules and recomputation among them. It takes some seconds.
# moefold.plan(run, gpu="H100", gpus=GPUS)
