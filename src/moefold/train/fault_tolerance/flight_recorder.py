"""Turn torch's NCCL flight recorder on, and read its dumps without executing them.

torch writes a dump per rank when a collective times out: which collectives were enqueued, started and finished. On
GPUs this says more than the ledger, which knows what was enqueued only. torch dumps if it is asked to, which
`recorder_environment` does. (Never run on GPUs: the variables are those that torch's own source names.)

The file is a pickle, and unpickling runs whatever a pickle names. A dump needs none of that: it is dicts, lists, text
and numbers. So a few opcodes are interpreted here, and a file that has any other is refused.
"""

from __future__ import annotations

import os
import pickletools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from moefold.errors import MoefoldError

# Plain data, and marks between them.
Stack = list[object]
T = TypeVar("T")
_MARK = object()
MAX_BYTES = 64 << 20
_MAX_VALUES, _MAX_DEPTH = 500_000, 64
# Opcodes whose argument is the value.
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_IGNORED = {"PROTO", "FRAME"}


# torch reads the first of a pair that is set; torch 2.11 knows the second ones only.
RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
_DUMP_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
FOLDER, _PREFIX = "flight_recorder", "rank_"


def recorder_environment(environment: Mapping[str, str], run_directory: Path) -> dict[str, str]:
    """Variables to set before the process group is made, so that a timeout is dumped into the run's directory.

    What a user has set stays as it is.
    """
    prefix = str(run_directory.resolve() / FOLDER / _PREFIX)
    wanted = RECORDER | dict.fromkeys(_DUMP_PREFIXES, prefix)
    return {name: value for name, value in wanted.items() if name not in environment}


def dump_files(environment: Mapping[str, str], run_directory: Path | None = None) -> list[Path]:
    """Dumps of all ranks on this host: of the run, where the variables say, and where torch writes them by default."""
    home = environment.get("HOME", "/tmp")
    cache = environment.get("XDG_CACHE_HOME", f"{home}/.cache")
    prefixes = [None if run_directory is None else f"{run_directory / FOLDER / _PREFIX}"]
    prefixes += [environment.get(name) for name in _DUMP_PREFIXES]
    prefixes += [f"{cache}/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]
    found: dict[Path, None] = {}
    for prefix in filter(None, prefixes):
        folder, name = os.path.split(prefix)
        for path in sorted(Path(folder or ".").glob(f"{name}[0-9]*")):
            if path.is_file() and path.name[len(name) :].isdecimal():
                found[path] = None
    return list(found)


def read_dump(path: Path) -> object:
    """The dump as plain data; a `MoefoldError` if it is more than that, or damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MoefoldError(f"{path.name}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise MoefoldError(f"{path.name}: {len(data):,} bytes, and dumps have at most {MAX_BYTES:,}")
    try:
        found = plain_pickle(data)
        _check_size(found)
        return found
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise MoefoldError(f"{path.name}: not plain data: {error}") from None


def _check_size(value: object) -> None:
    """A pickle can refer to a value again and again, so that a small one has no end of values; and be nested deeply."""
    waiting, count = [(value, 0)], 0
    while waiting:
        each, depth = waiting.pop()
        count += 1
        if count > _MAX_VALUES or depth > _MAX_DEPTH:
            raise ValueError(f"has more than {_MAX_VALUES:,} values or {_MAX_DEPTH} levels")
        inner = [*each, *each.values()] if isinstance(each, dict) else each
        if isinstance(inner, list | tuple):
            waiting += ((one, depth + 1) for one in inner)


def plain_pickle(data: bytes) -> object:
    """The value of a pickle that has only dicts, lists, tuples, text, numbers, booleans and None."""
    stack: Stack = []
    memo: dict[object, object] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _BUILDERS:
            _BUILDERS[name](stack)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "STOP":
            (value,) = stack
            return value
        elif name not in _IGNORED:
            raise ValueError(f"has the opcode {name}")
    raise ValueError("has no end")


def _marked(stack: Stack) -> Stack:
    """Everything above the last mark, which is removed with it."""
    place = len(stack) - 1 - next(i for i, value in enumerate(reversed(stack)) if value is _MARK)
    items = stack[place + 1 :]
    del stack[place:]
    return items


def _pairs(items: Stack) -> Iterator[tuple[object, object]]:
    return zip(items[::2], items[1::2], strict=True)


def _top(kind: type[T], stack: Stack) -> T:
    top = stack[-1]
    if not isinstance(top, kind):
        raise ValueError(f"has items for a {type(top).__name__}")
    return top


def _append(stack: Stack) -> None:
    item = stack.pop()
    _top(list, stack).append(item)


def _appends(stack: Stack) -> None:
    items = _marked(stack)
    _top(list, stack).extend(items)


def _set_item(stack: Stack) -> None:
    value, key = stack.pop(), stack.pop()
    _top(dict, stack)[key] = value


def _set_items(stack: Stack) -> None:
    items = _marked(stack)
    _top(dict, stack).update(_pairs(items))


def _tuple_of(count: int) -> Callable[[Stack], None]:
    def build(stack: Stack) -> None:
        items = stack[-count:]
        del stack[-count:]
        stack.append(tuple(items))

    return build


_BUILDERS: dict[str, Callable[[Stack], None]] = {
    "MARK": lambda stack: stack.append(_MARK),
    "EMPTY_LIST": lambda stack: stack.append([]),
    "EMPTY_DICT": lambda stack: stack.append({}),
    "EMPTY_TUPLE": lambda stack: stack.append(()),
    "TUPLE": lambda stack: stack.append(tuple(_marked(stack))),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
}
