"""`moefold completion SHELL`: a script that completes verbs, options, choices and recipes, written from the parsers.

What a shell proposes is data, collected once: by verb (or verb and part, as `convert to-hf`) its options, and whether a
recipe may stand there. The three scripts are the same table in three languages; where nothing fits, files are proposed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from moefold.cli.run_argument import Subparsers

EXAMPLES = """examples:
  moefold completion bash > ~/.local/share/bash-completion/completions/moefold
  moefold completion zsh > ~/.zfunc/_moefold
  moefold completion fish > ~/.config/fish/completions/moefold.fish

For this shell only: `source <(moefold completion bash)`. zsh reads folders that are in its fpath."""


class Completed(NamedTuple):
    """``path``: the words before, `("convert", "to-hf")`; ``words`` may follow; ``choices`` by option."""

    path: tuple[str, ...]
    words: tuple[str, ...]
    choices: dict[str, tuple[str, ...]]
    takes_run: bool


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands in bash, zsh or fish",
        description="Print a script that completes verbs, options, choices and recipes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")
    parser.add_argument("--json", action="store_true", help="print the table that the scripts are written from")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import json

    from moefold.cli.main import VERBS, parser_of
    from moefold.recipes.catalog import RECIPES

    table, recipes = list(completed(parser_of(list(VERBS)))), sorted(RECIPES)
    if args.json:
        rows = [row._asdict() | {"path": " ".join(row.path)} for row in table]
        print(json.dumps({"recipes": recipes, "commands": rows}, indent=2))
    else:
        print("\n".join({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](table, recipes)))
    return 0


def completed(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Completed]:
    words: list[str] = []
    choices: dict[str, tuple[str, ...]] = {}
    inner: list[tuple[str, argparse.ArgumentParser]] = []
    takes_run = False
    for action in parser._actions:
        words += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            inner += action.choices.items()
            words += action.choices
        elif action.choices is not None and action.option_strings:
            choices |= {option: tuple(map(str, action.choices)) for option in action.option_strings}
        elif action.choices is not None:
            words += map(str, action.choices)
        takes_run |= action.metavar == "RUN" and not action.option_strings
    yield Completed(path, tuple(words), choices, takes_run)
    for name, below in inner:
        yield from completed(below, (*path, name))


def bash(table: list[Completed], recipes: list[str]) -> Iterator[str]:
    yield from ("# Written by `moefold completion bash`.", "_moefold() {")
    yield "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words="
    yield '    local where="${COMP_WORDS[*]:1:COMP_CWORD-1}"'
    yield '    case "$where " in'
    # The longest path first: a verb's parts are found before the verb.
    for row in sorted(table, key=lambda row: -len(row.path)):
        pattern = " ".join(row.path)
        more = " " + " ".join(recipes) if row.takes_run else ""
        choices = "".join(f' {option}) words="{" ".join(known)}" ;;' for option, known in row.choices.items())
        given = f'case $before in{choices} *) words="{" ".join(row.words)}{more}" ;; esac'
        yield f'        "{pattern} "*) {given} ;;' if pattern else f"        *) {given} ;;"
    yield from ("    esac", '    COMPREPLY=($(compgen -W "$words" -- "$word"))')
    yield from ("}", "complete -o default -F _moefold moefold")


def zsh(table: list[Completed], recipes: list[str]) -> Iterator[str]:
    """zsh runs bash's functions."""
    yield from ("#compdef moefold", "autoload -U +X bashcompinit && bashcompinit")
    yield from bash(table, recipes)


def fish(table: list[Completed], recipes: list[str]) -> Iterator[str]:
    yield "# Written by `moefold completion fish`."
    verbs = [row.path[0] for row in table if len(row.path) == 1]
    for row in table:
        said = " ".join(f"__fish_seen_subcommand_from {word};" for word in row.path).replace("; __", "; and __")
        when = f"-n '{said}'" if row.path else f"-n 'not __fish_seen_subcommand_from {' '.join(verbs)}'"
        plain = [word for word in row.words if not word.startswith("-")] + (recipes if row.takes_run else [])
        if plain:
            yield f"complete -c moefold {when} -a '{' '.join(plain)}'"
        for option in row.words:
            if option.startswith("--"):
                known = f" -x -a '{' '.join(row.choices[option])}'" if option in row.choices else ""
                yield f"complete -c moefold {when} -l {option[2:]}{known}"
