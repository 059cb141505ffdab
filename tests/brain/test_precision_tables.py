"""What papers measured of FP8 and FP4, beside the planner's predictions: the tables of docs/precision.md.

`python -m tests.brain.test_precision_tables` writes them; the test fails where the page says something else.
"""

from __future__ import annotations

from pathlib import Path

from tests.brain.test_plan_memory import at_rank

from benchmarks.report_runs import DATED, DEEP, GIB, GRAPHED, HYBRID, TABLE_3, TABLE_20, Sections, both, job
from moefold.config.precision_recipes import NarrowRecipe
from moefold.plan.predict import predict
from moefold.plan.workload import PlannedFormat, Workload, changed
from moefold.tables import markdown_table

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"
BEGIN, END = "<!-- papers beside predictions: begin -->\n", "<!-- end -->\n"
# The guide's run: TP1 PP8 VPP4 EP32, 2048 sequences, on 256 GB200.
GUIDE = (4096, 1, 2048), dict(pp=8, ep=32, vpp=4)
BASELINE: Sections = {"framework": {"date": 2025.6}, "memory": {"recompute": ("feed_forward", "mla_up")}}
LAST = both(HYBRID, {"framework": {"date": 2025.9}, "memory": {"recompute": ("feed_forward",)}})
# Section 4.1.3: 16 of 131 GB in FP8, by halving 32 GB of inputs. Table 8: a quarter of these is left in FP4.
ELIGIBLE = 32.0
RECIPES: dict[NarrowRecipe, float] = {"fp8_tensor": 0.5, "fp8_blockwise": 0.5, "mxfp8": 0.5, "nvfp4": 0.75}


def memory_rows() -> list[tuple[str, ...]]:
    """GiB of activations that a recipe saves, of DeepSeek-V3 in the layout of the report's Table 3."""
    wide = at_rank(TABLE_3).of("activations")
    rows = []
    for name, share in RECIPES.items():
        saved = (wide - at_rank(changed(TABLE_3, precision={"recipe": name})).of("activations")) / GIB
        rows.append((f"`{name}`", f"{ELIGIBLE * share:.0f}", f"{saved:.1f}", f"{saved / wide * GIB:.0%}"))
    return rows


def speed_rows() -> list[tuple[str, ...]]:
    """TFLOP/s per GPU."""
    batch, degrees = GUIDE
    guide = [
        ("guide, first row: all-to-all", "deepseek_v3", "GB200", 256, "mxfp8", batch, BASELINE, degrees, 494.46),
        ("guide, last row: HybridEP, graphs", "deepseek_v3", "GB200", 256, "mxfp8", batch, LAST, degrees, 970.01),
    ]
    rows = []
    for source, model, gpu, gpus, form, size, how, layout, measured in [
        *(("report", *row) for row in TABLE_20),
        *guide,
    ]:
        found = predict(job(model, gpu, gpus, form, size, how, **layout)).tflops_per_gpu
        what = f"{model}, {gpus} {gpu}, {size[0]} tokens"
        rows.append((source, what, f"`{form}`", f"{measured:.0f}", f"{found:.0f}", f"{found / measured - 1:+.0%}"))
    return rows


def same_layout(gpu: str, gpus: int, formats: tuple[PlannedFormat, ...], how: Sections) -> list[Workload]:
    return [job("deepseek_v3", gpu, gpus, form, (4096, 1, 8192), how, pp=4, ep=64, vpp=4) for form in formats]


def gain_rows() -> list[tuple[str, ...]]:
    """Speed over bfloat16 in one layout, which nobody has printed."""
    rows = []
    asked: tuple[tuple[str, int, tuple[PlannedFormat, ...], Sections], ...] = (
        ("H100", 256, ("bfloat16", "fp8_tensor", "fp8_blockwise"), both(DATED, DEEP)),
        ("GB200", 256, ("bfloat16", "fp8_tensor", "mxfp8", "nvfp4"), both(HYBRID, GRAPHED)),
        ("GB300", 256, ("bfloat16", "fp8_tensor", "mxfp8", "nvfp4"), both(HYBRID, GRAPHED)),
    )
    for gpu, gpus, formats, how in asked:
        wide, *narrow = [predict(each).tflops_per_gpu for each in same_layout(gpu, gpus, formats, how)]
        said = ", ".join(f"`{form}` {found / wide:.2f}" for form, found in zip(formats[1:], narrow))
        rows.append((f"deepseek_v3, {gpus} {gpu}", f"{wide:.0f}", said))
    return rows


def tables() -> str:
    memory = markdown_table(("recipe", "report, GB saved", "predicted, GiB saved", "of activations"), memory_rows())
    speed = markdown_table(("source", "run", "format", "measured", "predicted", "error"), speed_rows())
    gain = markdown_table(("run", "bfloat16, TFLOP/s", "times as fast"), gain_rows())
    return f"\n{memory}\n\n{speed}\n\n{gain}\n\n"


def test_the_page_has_these_tables() -> None:
    said = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    assert said == tables(), "python -m tests.brain.test_precision_tables writes them"


def test_predictions_are_near_what_was_measured() -> None:
    """Of memory the report prints "approximately 16 GB", without copies that FP8 adds."""
    saved = {row[0]: float(row[2]) for row in memory_rows()}
    assert 10 < saved["`mxfp8`"] < 20 and saved["`mxfp8`"] < saved["`nvfp4`"] < 32
    errors = [abs(float(row[4]) / float(row[3]) - 1) for row in speed_rows()]
    assert sum(errors) / len(errors) < 0.12


if __name__ == "__main__":
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{tables()}{END}{rest.partition(END)[2]}", "utf-8")
