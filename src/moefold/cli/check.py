"""`moefold check`: every problem of a run, and its parameter counts if its sizes and layout are valid."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, fields

from moefold.api.runs import check, load_run
from moefold.blueprint.narrow_matmuls import matmuls
from moefold.blueprint.param_counts import Counts, active_size, count_parameters
from moefold.blueprint.parameters import buffers, layer_parameters, mtp_parameters
from moefold.blueprint.stage_modules import RankParams, largest_rank_params, stage_table
from moefold.checks.kernels import experts_in_use
from moefold.cli.run_argument import Subparsers, add_run_argument
from moefold.config.model import ModelConfig
from moefold.config.precision import BYTES
from moefold.config.precision_recipes import LinearCasts
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, MoefoldError, Problem
from moefold.plan.dispatch_choice import dispatcher_in_use, estimates
from moefold.plan.stage_contents import parts_by_rank, places_of
from moefold.recipes.catalog import RECIPES, recipe, tuned_layouts
from moefold.recipes.latent_moe import PRESETS
from moefold.tables import text_table
from moefold.topology.folded_layout import fold
from moefold.units import format_bytes, format_count

EXAMPLES = """examples:
  moefold check deepseek_v3
  moefold check mixtral_8x7b --world 64 --parallel.ep 4 --parallel.etp 2 --data.train data/web
  moefold check my_run.yaml --world 512 --json
  moefold check qwen3_30b_a3b_proxy --casts --precision.recipe mxfp8 --precision.wide '[layers.0.*]'
  moefold check --list

A published recipe names no data: its sizes are printed, and data.train is a problem until tokens are named.
Exits with 0 when there is no problem, 1 when there is one, 2 when the command is wrong."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "check",
        help="list every problem of a run, and its parameter counts",
        description="List every problem of a run, and its parameter counts if its sizes and layout are valid.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser, optional=True)
    parser.add_argument("--world", type=int, metavar="N", help="number of ranks: also check that the layout folds")
    parser.add_argument("--casts", action="store_true", help="list every matmul that precision.recipe could narrow")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="list the recipes with their sizes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return list_recipes(args.json)
    if args.name is None:
        raise MoefoldError("no RUN given; name a recipe or a YAML file; `moefold check --list` shows the recipes")
    return check_run(args.name, args.changes, args.world, args.json, args.casts)


def check_run(name: str, changes: list[str], world: int | None, as_json: bool, casts: bool = False) -> int:
    """Print the report about one run and return the exit code."""
    try:
        run = load_run(name, changes)
    except ConfigError as error:
        return _report_problems(name, list(error.problems), as_json)
    found = check(run, world)
    if check(run, world, training=False):
        return _report_problems(run.name, found, as_json)
    largest = (
        largest_rank_params(run.model, fold(run.parallel, world), parts_by_rank(run)) if world is not None else None
    )
    if as_json:
        data = _as_dict(run, world, largest) | {"problems": [asdict(problem) for problem in found]}
        data |= {"casts": _casts_data(run)} if casts else {}
        print(json.dumps(data, indent=2))
        return 1 if found else 0
    if not found:
        print(f"{run.name}: no problems\n")
    print("\n\n".join([*_report(run, world, largest), *([_casts_table(run)] if casts else [])]))
    if found:
        print()
        return _report_problems(run.name, found, as_json)
    return 0


def _casts_data(run: RunConfig) -> dict[str, dict[str, str]]:
    """By weight: its six casts; empty where its matmuls stay wide."""
    return {
        weight.name: {} if casts is None else {operand: str(cast) for operand, cast in casts.items()}
        for weight, casts in matmuls(run)
    }


def _casts_table(run: RunConfig) -> str:
    """A row per matmul: fprop sums over columns of x and w, dgrad over rows of w, wgrad over tokens."""
    heads = ("weight", "shape", *(field.name for field in fields(LinearCasts)))
    rows = []
    for weight, casts in matmuls(run):
        said = [run.precision.compute] * 6 if casts is None else [str(cast) for _, cast in casts.items()]
        rows.append((weight.name, "x".join(map(str, weight.shape)), *said))
    return text_table(heads, rows)


def list_recipes(as_json: bool) -> int:
    counts = {name: count_parameters(make().model) for name, make in RECIPES.items()}
    layouts = tuned_layouts()
    if as_json:
        listed = {
            name: {
                "total": count.total,
                "active": count.active,
                "layouts": _layout_data(name),
                "presets": {preset: {"layouts": _layout_data(f"{name}+{preset}")} for preset in PRESETS},
            }
            for name, count in counts.items()
        }
        print(json.dumps(listed, indent=2))
        return 0
    rows = [
        (name, format_count(count.total), format_count(count.active), (RECIPES[name].__doc__ or "").splitlines()[0])
        for name, count in counts.items()
    ]
    print(text_table(("recipe", "total", "active", "about"), rows))
    print("\nLatentMoE of any of them: NAME+PRESET\n")
    print(text_table(("preset", "about"), [(f"+{name}", preset.about) for name, preset in PRESETS.items()]))
    tuned = [_layout_row(name, where) for name, found in layouts.items() for where in found]
    print(
        "\nthe same with the planner's layout for so many GPUs: step time, memory and tokens per GPU and second that it"
    )
    print("predicts, and the nearest run that somebody has measured and published, on whatever framework\n")
    print(text_table(("recipe", "step", "memory", "tokens/s", "layout", "published", "nearest published run"), tuned))
    return 0


def _layout_data(name: str) -> dict[str, dict[str, object]]:
    return {
        where: tuned._asdict() | {"nearest": tuned.nearest._asdict() if tuned.nearest else None}
        for where, tuned in tuned_layouts().get(name, {}).items()
    }


def _layout_row(name: str, where: str) -> tuple[str, ...]:
    tuned, run = tuned_layouts()[name][where], recipe(f"{name}@{where}")
    rate = run.data.global_batch * run.data.seq_len / tuned.step_seconds / int(where.rpartition("x")[2])
    near = tuned.nearest
    published = (f"{near.tokens_per_gpu_second:,.0f}", f"{near.what} ({near.source})") if near else ("", "")
    step, memory = f"{tuned.step_seconds:.4g} s", f"{tuned.gib:g} GiB"
    return (f"{name}@{where}", step, memory, f"{rate:,.0f}", _short_layout(run), *published)


def _short_layout(run: RunConfig) -> str:
    parallel = run.parallel
    sizes = ((axis, getattr(parallel, axis)) for axis in ("tp", "cp", "pp", "vpp", "ep", "etp"))
    words = [f"{axis}{size}" for axis, size in sizes if size > 1]
    return " ".join([*words, parallel.schedule, parallel.dispatcher, parallel.sharding])


def _report_problems(name: str, found: list[Problem], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"run": name, "problems": [asdict(problem) for problem in found]}, indent=2))
        return 1
    for problem in found:
        print(f"{problem.path}: {problem.message}" + (f"\n    fix: {problem.fix}" if problem.fix else ""))
    print(f"{name}: {len(found)} problem{'s' if len(found) > 1 else ''}")
    return 1


def _report(run: RunConfig, world: int | None, largest: RankParams | None) -> Iterator[str]:
    counts = count_parameters(run.model)
    yield _sizes_table(run, counts)
    kinds = sorted(counts.by_kind.items(), key=lambda item: -item[1])
    yield text_table(("kind", "parameters", "share"), [(kind, f"{n:,}", _percent(n, counts)) for kind, n in kinds])
    yield text_table(("layers", "feed-forward", "parameters of each", "active"), list(_layer_rows(run.model)))
    if run.kernels.experts == "auto" and run.model.moe is not None:
        rows = [(device, name) for device, name in _experts(run).items()]
        yield text_table((f"experts in {run.precision.compute}", "kernels.experts auto stands for"), rows)
    if run.parallel.dispatcher == "adaptive" and run.model.moe is not None:
        yield _dispatcher_table(run)
    if largest is not None and world is not None:
        yield _rank_table(run, world, largest)
        if run.parallel.pp * run.parallel.vpp > 1:
            yield stage_table(places_of(run, fold(run.parallel, world)))


def _sizes_table(run: RunConfig, counts: Counts) -> str:
    rows = [
        ("total", counts.total, "every trained parameter"),
        ("active", counts.active, "used by one token: all but the experts it is not assigned to"),
        ("experts", counts.experts, f"routed experts, {_percent(counts.experts, counts)} of the total"),
        ("total, matrices", counts.matrices, "without norms, biases and sinks, as in published tables"),
        ("active, matrices", counts.active_matrices, "active without norms, biases and sinks"),
    ]
    if run.model.num_mtp:
        rows += [
            ("MTP", counts.mtp, "of the total: MTP modules, which published tables leave out"),
            ("MTP, active", counts.active_mtp, "of the active ones"),
        ]
    table = text_table(
        ("parameters", "exactly", "about", "what"), [(a, f"{n:,}", format_count(n), b) for a, n, b in rows]
    )
    weight = format_bytes(counts.total * BYTES[run.precision.params])
    bias = sum(spec.size for spec in buffers(run.model))
    untrained = f"; beside them {bias:,} entries of the loss-free bias, which is not trained" if bias else ""
    return f"{table}\n\n{weight} in {run.precision.params}{untrained}"


def _layer_rows(model: ModelConfig) -> Iterator[tuple[str, str, str, str]]:
    """One row for the dense layers, one for the MoE layers, in a hybrid by kind of attention too.

    Within a row, all layers have equal sizes.
    """
    top_k = model.moe.top_k if model.moe is not None else 0
    rows: dict[str, list[int]] = {"dense": [], "dense, linear attention": [], "MoE": [], "MoE, linear attention": []}
    for layer in range(model.num_layers):
        attention = ", linear attention" if model.is_linear_layer(layer) else ""
        rows[("MoE" if model.is_moe_layer(layer) else "dense") + attention].append(layer)
    for kind, layers in rows.items():
        if layers:
            specs = list(layer_parameters(model, layers[0]))
            total, active = sum(s.size for s in specs), sum(active_size(s, top_k) for s in specs)
            yield (_layer_names(layers), kind, f"{total:,}", f"{active:,}")
    if model.num_mtp:
        mtp = list(mtp_parameters(model, 0))
        kind = "MoE" if model.is_moe_layer(model.num_layers) else "dense"
        total, active = sum(s.size for s in mtp), sum(active_size(s, top_k) for s in mtp)
        yield ("MTP" if model.num_mtp == 1 else f"MTP 0-{model.num_mtp - 1}", kind, f"{total:,}", f"{active:,}")


def _layer_names(layers: list[int]) -> str:
    if len(layers) > 1 and layers[-1] - layers[0] >= len(layers):
        return f"{layers[0]}, {layers[1]}, ... {layers[-1]}" if len(layers) > 2 else f"{layers[0]}, {layers[1]}"
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"


def _rank_table(run: RunConfig, world: int | None, largest: RankParams) -> str:
    rows = [
        (what, f"{n:,}", format_count(n), format_bytes(n * BYTES[run.precision.params]))
        for what, n in (("unsharded (after tp, ep, etp, pp)", largest.computed), ("FSDP shard", largest.at_rest))
    ]
    stage = f", a rank of stage {largest.stage}" if run.parallel.pp > 1 else ""
    return text_table((f"largest of {world:,} ranks{stage}", "parameters", "about", run.precision.params), rows)


def _dispatcher_table(run: RunConfig) -> str:
    """The expected cost of each dispatcher, and the one that `adaptive` takes."""
    chosen = dispatcher_in_use(run)
    rows = [
        (name, f"{seconds * 1e3:.3g} ms", "chosen" if name == chosen else "")
        for name, seconds in sorted(estimates(run).items(), key=lambda item: item[1])
    ]
    return text_table(("dispatcher", "dispatch and combine, expected", ""), rows)


def _experts(run: RunConfig) -> dict[str, str]:
    """The backend of the experts by kind of device."""
    return {device: experts_in_use(run, device) for device in ("cpu", "cuda")}


def _percent(part: int, counts: Counts) -> str:
    return f"{100 * part / counts.total:.2f} %"


def _as_dict(run: RunConfig, world: int | None, largest: RankParams | None) -> dict[str, object]:
    counts = count_parameters(run.model)
    return {
        "run": run.name,
        "problems": [],
        "parameters": asdict(counts),
        "buffers": sum(spec.size for spec in buffers(run.model)),
        "bytes": {run.precision.params: counts.total * BYTES[run.precision.params]},
        "world": world,
        "dispatcher": dispatcher_in_use(run) if run.model.moe is not None else None,
        "experts": _experts(run) if run.model.moe is not None else None,
        "largest_rank": asdict(largest) if largest else None,
    }
