"""Record the signatures of flash-attn's functions that ``attention/varlen_flash.py`` calls, from sources on disk.

    python -m tests.body.record_flash_signatures flash_attn_2 2.8.3 SOURCE

replaces that entry of ``flash_attn_signatures.json``. The sources are parsed and not imported.
"""

from __future__ import annotations

import argparse
import ast
import json
from datetime import date
from pathlib import Path

FILE = Path(__file__).with_name("flash_attn_signatures.json")
FUNCTIONS = {
    "flash_attn_2": ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
    "flash_attn_3": ("_flash_attn_forward", "_flash_attn_backward"),
    "flash_attn_4": ("_flash_attn_fwd", "_flash_attn_bwd"),
}


def signatures(source: str, names: tuple[str, ...]) -> dict[str, list[list[object]]]:
    """Each function's arguments in order, and whether it must be given."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            arguments = node.args.posonlyargs + node.args.args
            required = len(arguments) - len(node.args.defaults)
            rows: list[list[object]] = [[argument.arg, place < required] for place, argument in enumerate(arguments)]
            keyword_only = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            rows += [[argument.arg, default is None] for argument, default in keyword_only]
            found[node.name] = rows
    assert set(found) == set(names), f"found {sorted(found)} of {names}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=FUNCTIONS)
    parser.add_argument("version")
    parser.add_argument("source", type=Path)
    args = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    functions = signatures(args.source.read_text(), FUNCTIONS[args.name])
    known[f"{args.name} {args.version}"] = {"recorded": date.today().isoformat(), "functions": functions}
    FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
