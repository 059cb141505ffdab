"""`moefold bench layer|attention|dispatch|step`: moefold beside the bare engine and beside its peers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.errors import ConfigError, MoefoldError, Problem

if TYPE_CHECKING:
    from moefold.bench.layer_shapes import LayerShape
    from moefold.bench.results import Contest
    from moefold.bench.targets import Verdict

    # A contest, what its times are compared with, and what the project promised.
    Held = tuple[Contest, tuple[str, ...], list[Verdict]]

NOTE = """
Contestants take turns, one run each per round, in an order that moves on by one; ratios are taken round by round.
Exits with 0 when every verdict is "reached" or none was asked for, 1 when one was missed, 2 when the command cannot be
understood. A library that is not installed is listed with its reason; docs/bench.md says how to install them."""

LAYER = f"""examples:
  moefold bench layer                                     # shapes a, b and c
  moefold bench layer b --same-allocator --out b.html
  moefold bench layer --tokens 512 --dim 256 --hidden 64 --experts 16 --top-k 4 --dtype float32 --json
  moefold bench layer a --contestants bare,ours --rounds 15
{NOTE}"""

DISPATCH = f"""examples:
  moefold bench dispatch                                  # shape b over 4 ranks
  moefold bench dispatch --world 2 --tokens 2048 --top-k 2 --dispatchers all_to_all,all_gather
  moefold bench dispatch --what exchange --json
  moefold bench dispatch --adaptive 20                    # how good the adaptive choice is, and this machine's link

Ranks are forked on this machine and talk through gloo; the slowest rank's time counts.
{NOTE}"""

ATTENTION = f"""examples:
  moefold bench attention
  moefold bench attention --tokens 2048 --length 256 --heads 8 --kv-heads 8 --dim 128 --dtype float32
{NOTE}"""

STEP = f"""examples:
  moefold bench step
  moefold bench step --rounds 15 --out step.html
  moefold bench step --set data.seq_len=128 --set model.num_layers=2 --contestants hand-written,moefold
{NOTE}"""

# Where progress is not on a terminal.
_SECONDS_BETWEEN_LINES = 10.0
_SIZES = ("tokens", "dim", "hidden", "experts", "top_k", "shared")
_ATTENTION_SIZES = ("tokens", "length", "heads", "kv_heads", "dim")


def add_layer(kinds: Any) -> None:
    parser = kinds.add_parser(
        "layer",
        help="one mixture layer beside its bare products and beside other libraries",
        description="Forward and backward of one mixture layer: dense products of equal FLOPs, torch's grouped "
        "product, moefold's layer, and the layers of transformers, torchtitan, megatron-core and Automodel.",
        epilog=LAYER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="a, b or c (default: all three)")
    _add_sizes(parser, _SIZES, "others from SHAPE or b")
    parser.add_argument(
        "--contestants",
        metavar="NAMES",
        help="names or groups (bare, ours, peers), with commas between them (default bare,moefold fused,peers)",
    )
    parser.add_argument(
        "--same-allocator", action="store_true", help="everybody keeps freed memory, as moefold's launcher does"
    )
    _add_routing(parser)
    add_common(parser)
    parser.set_defaults(run=layer)


def add_dispatch(kinds: Any) -> None:
    parser = kinds.add_parser(
        "dispatch",
        help="tokens to experts on other ranks and back, beside a bare all-to-all; and the layer spread over ranks",
        description="Dispatch and combine of each dispatcher beside torch's all-to-all of the same rows, and the whole "
        "expert-parallel layer beside the dense products of each rank.",
        epilog=DISPATCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", type=int, default=4, metavar="N", help="ranks (default 4)")
    parser.add_argument("--what", choices=("exchange", "layer", "both"), default="both", help="default: both")
    parser.add_argument("--dispatchers", metavar="NAMES", help="with commas between them (default: all)")
    parser.add_argument(
        "--adaptive", type=int, metavar="N", help="instead: does the adaptive choice pick well in N random cases?"
    )
    _add_sizes(parser, _SIZES, "tokens of all ranks; others from shape b")
    _add_routing(parser)
    add_common(parser, threads=False)
    parser.set_defaults(run=dispatch, shapes=["b"])


def add_attention(kinds: Any) -> None:
    parser = kinds.add_parser(
        "attention",
        help="moefold's attention beside torch's fused call and beside its bare products",
        description="Forward and backward of causal attention over packed documents of equal length.",
        epilog=ATTENTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_sizes(parser, _ATTENTION_SIZES, "default: 4096 tokens, documents of 1024, 16 heads over 4, 64 entries")
    add_common(parser)
    parser.set_defaults(run=attention)


def add_step(kinds: Any) -> None:
    parser = kinds.add_parser(
        "step",
        help="a whole training step beside a hand-written one and beside transformers' Trainer",
        description="One training step of the same model on the same batch: moefold, plain torch written by hand with "
        "the same kernels, and transformers' Trainer.",
        epilog=STEP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--contestants", metavar="NAMES", help="with commas between them (default: all)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the run, as in data.seq_len=256"
    )
    add_common(parser)
    parser.set_defaults(run=step)


def _add_sizes(parser: argparse.ArgumentParser, sizes: tuple[str, ...], otherwise: str) -> None:
    group = parser.add_argument_group("sizes of your own", otherwise)
    for size in sizes:
        group.add_argument(f"--{size.replace('_', '-')}", type=int, metavar="N")


def _add_routing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--routing", choices=("fixed", "changing", "both"), default="both", help="default: both")


def add_common(parser: argparse.ArgumentParser, threads: bool = True) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    if threads:
        parser.add_argument("--threads", type=int, default=1, metavar="N", help="per process (default 1)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="that count; 7 for a verdict (default 9)")
    parser.add_argument("--warm", type=int, default=8, metavar="N", help="rounds before those (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, all runs in it")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="draw a chart")


def layer(args: argparse.Namespace) -> int:
    check_common(args)
    from moefold.bench.layer_comparison import BASES, USUAL, Setting, bench_layer, chosen_names

    setting = Setting(args.dtype, args.threads, args.same_allocator, args.rounds, args.warm, _routings(args))
    names = chosen_names(_words(args.contestants) or USUAL)
    held = []
    for shape in _shapes(args):
        contest, found = bench_layer(shape, setting, names, progress())
        held.append((contest, BASES, found))
    return show(args, held)


def dispatch(args: argparse.Namespace) -> int:
    check_common(args)
    if args.adaptive is not None:
        return _adaptive(args)
    from moefold.bench import dispatch_comparison as contests
    from moefold.bench.layer_comparison import Setting

    setting = Setting(args.dtype, 1, True, args.rounds, args.warm, _routings(args))
    names = _words(args.dispatchers) or list(contests.DISPATCHERS)
    shape = _shapes(args)[0]
    contests.check_dispatch(shape, args.world, names)
    held = []
    for what, hold, bases in (
        ("exchange", contests.bench_exchange, contests.EXCHANGE_BASES),
        ("layer", contests.bench_spread_layer, contests.LAYER_BASES),
    ):
        if args.what in (what, "both"):
            contest, found = hold(shape, args.world, setting, names, progress())
            held.append((contest, bases, found))
    return show(args, held)


def _adaptive(args: argparse.Namespace) -> int:
    if args.adaptive < 1:
        raise ConfigError(Problem("--adaptive", f"is {args.adaptive}", "use 1 or more"))
    from moefold.bench.adaptive_cases import measure_choices
    from moefold.bench.adaptive_report import adaptive_data, adaptive_report

    measured = measure_choices(args.adaptive, args.rounds, args.warm, say=progress())
    print(json.dumps(adaptive_data(measured), indent=2) if args.json else adaptive_report(measured))
    return 0


def attention(args: argparse.Namespace) -> int:
    check_common(args)
    from moefold.bench.attention_comparison import BASES, bench_attention
    from moefold.bench.attention_shapes import AttentionShape, checked
    from moefold.bench.layer_comparison import Setting

    own = {size: getattr(args, size) for size in _ATTENTION_SIZES if getattr(args, size) is not None}
    setting = Setting(args.dtype, args.threads, True, args.rounds, args.warm)
    return show(args, [(bench_attention(checked(AttentionShape(**own)), setting, progress()), BASES, [])])


def step(args: argparse.Namespace) -> int:
    check_common(args)
    from moefold.bench.layer_comparison import Setting
    from moefold.bench.step_comparison import BASES, bench_step, chosen_names

    setting = Setting(args.dtype, args.threads, False, args.rounds, args.warm)
    changes = dict(_pair(word) for word in args.set)
    contest, found = bench_step(setting, chosen_names(_words(args.contestants)), changes, progress())
    return show(args, [(contest, BASES, found)])


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(Problem("--set", f"{word!r} has no '='", "write it as data.seq_len=256"))
    return key, value


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def _routings(args: argparse.Namespace) -> tuple[str, ...]:
    return ("fixed", "changing") if args.routing == "both" else (args.routing,)


def _shapes(args: argparse.Namespace) -> list[LayerShape]:
    from dataclasses import replace

    from moefold.bench.layer_shapes import SHAPES, checked
    from moefold.errors import UnknownNameError

    for name in args.shapes:
        if name not in SHAPES:
            raise UnknownNameError("shape", name, SHAPES)
    own = {size: getattr(args, size) for size in _SIZES if getattr(args, size) is not None}
    if not own:
        return [SHAPES[name] for name in args.shapes or SHAPES]
    if len(args.shapes) > 1:
        raise ConfigError(Problem("SHAPE", f"{len(args.shapes)} shapes beside sizes of your own", "name one or none"))
    return [checked(replace(SHAPES[args.shapes[0] if args.shapes else "b"], **own))]


def check_common(args: argparse.Namespace) -> None:
    """All that is wrong with the common options, before anything is measured."""
    problems = [
        Problem(f"--{name}", f"is {getattr(args, name)}", f"use {least} or more")
        for name, least in (("rounds", 1), ("warm", 0), ("threads", 1))
        if getattr(args, name, least) < least
    ]
    if args.out is not None and not args.out.parent.is_dir():
        problems.append(Problem("--out", f"{args.out.parent} is no directory"))
    if problems:
        raise ConfigError(*problems)


def show(args: argparse.Namespace, held: list[Held]) -> int:
    from moefold.bench.comparison_report import contest_json, contest_text

    if args.json:
        print(json.dumps({"contests": [contest_json(*each) for each in held]}))
    else:
        print("\n\n\n".join(contest_text(*each) for each in held))
    if args.out is not None:
        _write_chart(args.out, held)
    return 1 if any(verdict.reached is False for _, _, found in held for verdict in found) else 0


def _write_chart(path: Path, held: list[Held]) -> None:
    from moefold.bench.comparison_chart import chart_page

    try:
        path.write_text(chart_page(held), encoding="utf-8")
    except OSError as error:
        raise MoefoldError(f"{path}: cannot be written: {error.strerror}; choose another --out") from error
    print(f"wrote {path}", file=sys.stderr)


def progress() -> Callable[[str, int, int], None]:
    """A line that is rewritten on a terminal; elsewhere one per finished part, and one now and then."""
    live = sys.stderr.isatty()
    spoken = time.monotonic()

    def say(what: str, done: int, total: int) -> None:
        nonlocal spoken
        if live:
            end = "\n" if done == total else ""
            print(f"\r{what}: {done} of {total}    ", end=end, file=sys.stderr, flush=True)
        elif done == total or time.monotonic() > spoken + _SECONDS_BETWEEN_LINES:
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
            spoken = time.monotonic()

    return say
