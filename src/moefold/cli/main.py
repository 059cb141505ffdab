"""`moefold VERB ...`: imports the verb's module, runs it, and prints errors without a traceback.

A verb is a module with `add_to(commands)`, which declares its arguments, and `run(args)`, which returns the exit code.
Only the verb on the command line is imported, and heavy imports are inside `run`, so that help and the torch-free verbs
start quickly. Exit codes: 0 done, 1 a negative result, 2 a wrong command.

A signal can arrive before the verb's module is imported. So this file imports only the signal handlers at its top, and
everything else after they are installed: `train` remembers the signal, and every other verb ends without a traceback.
"""

from __future__ import annotations

import sys

from moefold.train.fault_tolerance.signals import StopRequest, stop_on_signals

TYPE_CHECKING = False  # true for a type checker; `typing` is slow to import
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from types import TracebackType
    from typing import NoReturn

VERBS = {
    "init": "moefold.cli.init",
    "plan": "moefold.cli.plan",
    "check": "moefold.cli.check",
    "layout": "moefold.cli.layout",
    "schedule": "moefold.cli.schedule",
    "dryrun": "moefold.cli.dryrun",
    "bench": "moefold.cli.bench",
    "prove": "moefold.cli.prove",
    "train": "moefold.cli.train",
    "sft": "moefold.cli.sft",
    "dpo": "moefold.cli.dpo",
    "profile": "moefold.cli.profile",
    "report": "moefold.cli.report",
    "replay": "moefold.cli.replay",
    "routing": "moefold.cli.routing",
    "generate": "moefold.cli.generate",
    "eval": "moefold.cli.eval",
    "tokenize": "moefold.cli.tokenize",
    "data": "moefold.cli.data",
    "convert": "moefold.cli.convert",
    "inspect": "moefold.cli.inspect",
    "doctor": "moefold.cli.doctor",
    "support-bundle": "moefold.cli.support_bundle",
    "completion": "moefold.cli.completion",
}
# What other programs call it.
_ELSEWHERE = {
    **dict.fromkeys(("pretrain", "fit", "run", "resume"), "train"),
    **dict.fromkeys(("finetune", "fine-tune", "tune", "lora"), "sft"),
    **dict.fromkeys(("export", "import", "save"), "convert"),
    **dict.fromkeys(("chat", "inference", "infer", "sample", "complete"), "generate"),
    **dict.fromkeys(("evaluate", "perplexity", "test"), "eval"),
    **dict.fromkeys(("config", "new", "create"), "init"),
    **dict.fromkeys(("env", "info", "diagnose"), "doctor"),
}
# Verbs that handle signals themselves, through `args.stop`.
STOPPED_BY_REQUEST = ("train", "sft", "dpo")


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code. Without ``argv`` it owns the process and its signal handlers."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        sys.excepthook = _print_traceback
        sys.unraisablehook = _interrupt_again
    if words and words[0] in STOPPED_BY_REQUEST:
        with stop_on_signals(until_exit=argv is None) as stop:
            return _dispatch(words, stop)
    try:
        return _dispatch(words, None)
    except KeyboardInterrupt:
        print("moefold: interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str], stop: StopRequest | None) -> int:
    from moefold.config.renamed_keys import renamed_option
    from moefold.errors import did_you_mean

    verb = words[0] if words else ""
    if verb and not verb.startswith("-") and verb not in VERBS:
        other = _ELSEWHERE.get(verb)
        hint = f"did you mean {other!r}? " if other in VERBS else did_you_mean(verb, VERBS)
        print(f"moefold: no verb {verb[:64]!r}; {hint}known: {', '.join(VERBS)}", file=sys.stderr)
        return 2
    if (renamed := renamed_option(words)) is not None:
        print(f"moefold: {renamed}", file=sys.stderr)
        return 2
    asked = [verb] if verb in VERBS else [] if verb == "--version" else list(VERBS)
    parser = parser_of(asked)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        print(f"moefold {verb}: {_explain_unknown(unknown[0], verb, parser)}", file=sys.stderr)
        return 2
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    args.stop, args.verb = stop, verb
    return _run(args)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Of a bug. An exception of a library may have an address with its login in it."""
    import traceback

    from moefold.redaction import without_login

    sys.stderr.write(without_login("".join(traceback.format_exception(kind, error, trace))))


def _interrupt_again(found: sys.UnraisableHookArgs) -> None:
    """Ctrl-C in a callback of the interpreter, such as those of import locks, is dropped by Python; it was meant."""
    if found.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(found)
        return
    import signal
    import threading

    # Here it would be dropped once more, so it comes when this has returned. A real signal also ends a wait.
    again = threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    again.daemon = True
    again.start()


def _explain_unknown(word: str, verb: str, parser: argparse.ArgumentParser) -> str:
    """About a word that no parser took."""
    from dataclasses import fields

    from moefold.cli.completion import completed
    from moefold.config.run import RunConfig
    from moefold.errors import did_you_mean

    see = f"see `moefold {verb} --help`"
    if not word.startswith("-"):
        return f"{word[:64]!r} is one word too many; {see}"
    option = word.partition("=")[0]
    if option[2:] in {field.name for field in fields(RunConfig)}:
        return f"no option {option}; keys of a run are dotted: {option}.KEY VALUE; `moefold init RECIPE` lists them"
    known = {other for row in completed(parser) if row.path[:1] == (verb,) for other in row.words if other[:2] == "--"}
    return f"no option {option[:64]}; {did_you_mean(option, sorted(known))}known: {', '.join(sorted(known))}; {see}"


def parser_of(verbs: Sequence[str]) -> argparse.ArgumentParser:
    """Of these verbs; importing a verb's module does not import torch."""
    import argparse
    import importlib

    from moefold import __version__

    class Parser(argparse.ArgumentParser):
        """Its errors name the command, what is wrong, and an example that works."""

        def error(self, message: str) -> NoReturn:
            lines = (self.epilog or "").splitlines()
            shown = next((line.strip() for line in lines if "moefold " in line), "").removeprefix("example: ")
            example = f"; for example `{shown}`" if shown else ""
            self.exit(2, f"{self.prog}: {message}{example}; see `{self.prog} --help`\n")

    parser = Parser(
        prog="moefold",
        description="Plan, prove and train Mixture-of-Experts language models.",
        epilog="example: moefold layout --world 64 --tp 2 --ep 8",
    )
    parser.add_argument("--version", action="version", version=f"moefold {__version__}")
    commands = parser.add_subparsers(metavar="VERB", title="verbs")
    for verb in verbs:
        importlib.import_module(VERBS[verb]).add_to(commands)
    return parser


def _run(args: argparse.Namespace) -> int:
    from moefold.errors import MoefoldError, missing_torch

    try:
        return int(args.run(args))
    except ModuleNotFoundError as error:
        if (explained := missing_torch(error, f"moefold {args.verb}")) is None:
            raise
        print(f"moefold: {explained}", file=sys.stderr)
        return 2
    except MoefoldError as error:
        print(f"moefold: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of stdout closed the pipe (`moefold ... | head`).
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
