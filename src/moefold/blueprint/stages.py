"""Which layers live on which (virtual) pipeline stage, written as a short string.

    E embedding    t transformer layer    m multi-token-prediction module    L final norm, head and loss    | next stage

`x*n` repeats a letter, `(...)*n` a group; groups may hold groups. The report's layout for DeepSeek-V3 on 16 ranks with
two virtual stages each is `Et*3|(tt|)*29m|L`: the embedding with three light dense layers, 29 stages of two layers, one
stage for the module that predicts a second token, one for the loss.

E stands first and L last, layers are in order, and modules come after them. A stage may be empty: it sends on
what it receives. Without a string moefold balances the costs of the parts, counted in parameters that a token uses;
other frameworks divide layers evenly (`even_stages`). Trainer and planner both read their stages here.

**Balancing** cuts a row of costs into consecutive parts. A pipeline is as slow as its slowest stage, so the first goal
is the smallest maximum, which is found exactly. Second: where the end of the row alone sets that maximum (a head over a
large vocabulary), the other parts must not grow to it. Third: the remaining freedom makes parts as equal as possible.
The first cost stays in the first part and the last in the last, for that is where the embedding and the loss belong;
parts between them may be empty. "Is a limit enough?" is answered by filling each part up to it, and halving finds the
least limit that is. Costs become whole numbers first, so every comparison is exact. Nothing here takes parts times
costs steps.

    costs 1 5 1 1 1 4 over 3 parts      1 5 | 1 1 1 | 4      largest 6
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from moefold.blueprint.model_shape import ModelShape, shape_of
from moefold.blueprint.param_counts import active_layer_size, active_module_size
from moefold.config.model import ModelConfig
from moefold.config.parallel import ParallelConfig
from moefold.errors import ConfigError, Problem


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Where each part but the first begins: `parts - 1` indices into `costs`, never falling."""
    if parts < 1 or len(costs) < 2:
        raise ValueError(f"{len(costs)} costs over {parts} parts: needs two costs and one part or more")
    if any(cost < 0 for cost in costs):
        raise ValueError(f"a cost of {min(costs)}: costs cannot be negative")
    if parts == 1:
        return []
    sums = (0, *accumulate(_whole_numbers(costs)))
    limit = _least(lambda limit: _fits(sums, parts, limit, limit), sums[-1])
    # The last part may cost the limit; the others may need less.
    others = _least(lambda smaller: _fits(sums, parts, smaller, limit), limit)
    return _spread(sums, parts, others, limit)


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """The same costs in units of the finest fraction among them; a float is always a whole number of such."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    finest = max(denominator for _, denominator in ratios)
    return [numerator * (finest // denominator) for numerator, denominator in ratios]


def _least(enough: Callable[[int], bool], known: int) -> int:
    """The smallest number that is enough, at most `known`, which is."""
    low, high = 0, known
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


def _fits(sums: Sequence[int], parts: int, limit: int, last: int) -> bool:
    """Whether every part but the last can stay within `limit`, and the last within `last`."""
    start = 0
    for _ in range(parts - 1):
        stop = _end_when_filled(sums, start, limit)
        if stop == start:
            break
        start = stop
    return start > 0 and sums[-1] - sums[start] <= last


def _end_when_filled(sums: Sequence[int], start: int, limit: int) -> int:
    """The farthest end of a part that begins at `start`; the last cost is left for the last part."""
    return bisect_right(sums, sums[start] + limit, start, len(sums) - 1) - 1


def _spread(sums: Sequence[int], parts: int, limit: int, last: int) -> list[int]:
    """Cuts within the limits, each as near as they allow to an even share of what is left to share."""
    earliest = _earliest_cuts(sums, parts, limit, last)
    # A last part that costs more than all others is no measure for them: they divide what comes before it.
    shared, takers = (sums[-1], parts) if limit == last else (sums[earliest[-1]], parts - 1)
    cuts: list[int] = []
    start = 0
    for part, low in enumerate(earliest):
        wanted = sums[start] + (shared - sums[start]) // (takers - part)
        start = max(low, start, min(_nearest(sums, wanted), _end_when_filled(sums, start, limit)))
        cuts.append(start)
    return cuts


def _earliest_cuts(sums: Sequence[int], parts: int, limit: int, last: int) -> list[int]:
    """For each cut the smallest index from which the rest still fits: parts filled from the back."""
    cuts, bound, stop = [0] * (parts - 1), last, len(sums) - 1
    for part in reversed(range(parts - 1)):
        start = bisect_left(sums, sums[stop] - bound, 0, stop)
        cuts[part] = stop = min(max(start, 1), len(sums) - 2)
        bound = limit
    return cuts


def _nearest(sums: Sequence[int], wanted: int) -> int:
    above = bisect_left(sums, wanted, 0, len(sums) - 1)
    return above - 1 if above > 0 and wanted - sums[above - 1] <= sums[above] - wanted else above


PATH = "parallel.stages"
# A string of a few characters can ask for any number of stages, layers or modules; nobody has this many.
MOST_STAGES = 100_000

_MEANING = {"E": "the embedding", "t": "a layer", "m": "an MTP module", "L": "the loss", "|": "the end of a stage"}
_TIMES = re.compile(r"\s*\*\s*([0-9]{0,6})(?![0-9])")

# A letter and where in the string it stands, counted from 0.
_Symbol = tuple[str, int]


@dataclass(frozen=True)
class StageSpec:
    """What one (virtual) stage holds; layers and MTP modules have the model's own numbers, from 0."""

    index: int
    embedding: bool
    layers: range
    mtp: tuple[int, ...]
    # The final norm, the head and the losses, those of the MTP modules too.
    loss: bool

    @property
    def empty(self) -> bool:
        return not (self.embedding or self.layers or self.mtp or self.loss)


def stages_of(model: ModelConfig, parallel: ParallelConfig) -> tuple[StageSpec, ...]:
    """The run's stages, pp * vpp of them: those of its string, or the balanced ones."""
    wanted = parallel.pp * parallel.vpp
    problems = stage_size_problems(model, parallel)
    if problems:
        raise ConfigError(*problems)
    if parallel.stages is None:
        return balanced_stages(shape_of(model), wanted)
    stages = parse_stages(parallel.stages, model.num_layers, model.num_mtp)
    if len(stages) != wanted:
        balanced = print_stages(balanced_stages(shape_of(model), wanted))
        raise ConfigError(
            Problem(
                PATH,
                f"{len(stages)} stages, but pp * vpp = {parallel.pp} * {parallel.vpp} = {wanted}",
                f"use {wanted - 1} `|`, such as {_brief(balanced)}",
            )
        )
    return stages


def stage_size_problems(model: ModelConfig, parallel: ParallelConfig) -> list[Problem]:
    """Numbers of stages or modules that cannot be written out."""
    sizes = (("parallel.pp", parallel.pp * parallel.vpp, "stages"), ("model.num_mtp", model.num_mtp, "MTP modules"))
    return [
        Problem(path, f"{size:,} {what}", f"use at most {MOST_STAGES:,}")
        for path, size, what in sizes
        if size > MOST_STAGES
    ]


def balanced_stages(model: ModelShape, num_stages: int) -> tuple[StageSpec, ...]:
    """Stages of which the most expensive is as cheap as possible."""
    letters = "E" + "t" * len(model.layers) + "m" * model.mtp + "L"
    edges = (0, *balance(part_costs(model), num_stages), len(letters))
    return _assemble([letters[start:stop] for start, stop in pairwise(edges)])


def part_costs(model: ModelShape) -> list[int]:
    """What the embedding, each layer, each MTP module and the loss cost: the parameters that one token uses.

    A token reads one row of the embedding, and the whole head once for itself and once per MTP module.
    """
    layers = [active_layer_size(layer, model.dim) for layer in model.layers]
    modules = [active_module_size(block, model.dim) for block in model.mtp_layers]
    return [model.dim, *layers, *modules, _head_cost(model)]


def even_stages(model: ModelShape, num_stages: int) -> tuple[StageSpec, ...]:
    """As most frameworks divide layers: evenly, with the embedding and the head in place of a layer each if that makes
    it even, else balanced. MTP modules are on the last stage."""
    number, last = len(model.layers), num_stages - 1
    if number % num_stages == 0:
        edges = [number // num_stages * index for index in range(num_stages + 1)]
    elif (number + 2) % num_stages == 0:
        each = (number + 2) // num_stages
        edges = [0, *(each * index - 1 for index in range(1, num_stages)), number]
    else:
        costs = [active_layer_size(layer, model.dim) for layer in model.layers]
        # The embedding costs a token nothing; the head and the modules before it stand at the end of the row.
        end = _head_cost(model) + sum(active_layer_size(block, model.dim) for block in model.mtp_layers)
        degrees = balance([0, *costs, end], num_stages)
        edges = [0, *(min(number, max(0, cut - 1)) for cut in degrees), number]
    return tuple(
        StageSpec(
            index, index == 0, range(start, stop), tuple(range(model.mtp)) if index == last else (), index == last
        )
        for index, (start, stop) in enumerate(pairwise(edges))
    )


def _head_cost(model: ModelShape) -> int:
    return (1 + model.mtp) * model.vocab * model.dim


def parse_stages(text: str, num_layers: int, num_mtp: int) -> tuple[StageSpec, ...]:
    """Read a string such as `Et*3|(tt|)*29m|L` for a model of this size, or say all that is wrong with it."""
    symbols = _unfold(text)
    problems = [*_order_problems(symbols), *_count_problems(symbols, num_layers, num_mtp)]
    if problems:
        raise ConfigError(*problems)
    return _assemble("".join(letter for letter, _ in symbols).split("|"))


def unfolded(text: str) -> str:
    """The same stages with every repetition written out."""
    return "".join(letter for letter, _ in _unfold(text))


def print_stages(stages: Sequence[StageSpec]) -> str:
    """A short string that parses to these stages."""
    *most, last = map(_letters, stages)
    written = ""
    for letters, equal in groupby(most):
        count = len(list(equal))
        once = letters + "|"
        repeated = (f"({once})" if letters else once) + f"*{count}"
        written += min(once * count, repeated, key=len)
    return written + last


def _letters(stage: StageSpec) -> str:
    return "E" * stage.embedding + _times("t", len(stage.layers)) + _times("m", len(stage.mtp)) + "L" * stage.loss


def _times(letter: str, count: int) -> str:
    return letter * count if count < 3 else f"{letter}*{count}"


def _assemble(stages: Sequence[str]) -> tuple[StageSpec, ...]:
    """Number the layers and modules of stages that are written out, such as ["Et", "tm", "L"]."""
    made: list[StageSpec] = []
    layer = module = 0
    for index, letters in enumerate(stages):
        layers, modules = range(layer, layer + letters.count("t")), range(module, module + letters.count("m"))
        made.append(StageSpec(index, "E" in letters, layers, tuple(modules), "L" in letters))
        layer, module = layers.stop, modules.stop
    return tuple(made)


def _unfold(text: str) -> list[_Symbol]:
    """Write every repetition out. A stack instead of recursion, and a bound: the string may come from anywhere."""
    levels: list[list[_Symbol]] = [[]]
    opened: list[int] = []
    at = written = 0
    while at < len(text):
        letter, here = text[at], at
        at += 1
        if letter.isspace():
            continue
        if letter == "(":
            levels.append([])
            opened.append(here)
            continue
        if letter == ")":
            if not opened:
                raise _wrong(text, here, "closes no group", "remove it, or open the group with `(`")
            opened.pop()
            repeated = levels.pop()
        elif letter in _MEANING:
            repeated = [(letter, here)]
            written += 1
        else:
            raise _wrong(text, here, "means nothing here", f"use {', '.join(_MEANING)}, `(...)*n` or `t*n`")
        count, at = _read_times(text, at)
        written += len(repeated) * (count - 1)
        if written > MOST_STAGES:
            raise _wrong(text, here, f"makes this more than {MOST_STAGES:,} letters", "repeat less")
        levels[-1] += repeated * count
    if opened:
        raise _wrong(text, opened[-1], "opens a group that is not closed", "close it with `)`")
    return levels[0]


def _read_times(text: str, at: int) -> tuple[int, int]:
    """The number after `*`, if there is one here, and where reading goes on."""
    found = _TIMES.match(text, at)
    if found is None:
        return 1, at
    if not found[1] or int(found[1]) == 0:
        raise _wrong(text, text.index("*", at), "says no number of times", "write a number from 1, as in t*3")
    return int(found[1]), found.end()


def _order_problems(symbols: Sequence[_Symbol]) -> list[Problem]:
    """What stands where it cannot: one E before everything, one L after everything, no layer after a module."""
    letters = "".join(letter for letter, _ in symbols)
    problems = []
    for letter, place, where in (("E", 0, "first"), ("L", len(letters) - 1, "last")):
        if letter not in letters:
            problems.append(Problem(PATH, f"no {letter}: {_MEANING[letter]} is on no stage", f"put {letter} {where}"))
        wrong = [at for i, (found, at) in enumerate(symbols) if found == letter and i != place]
        if wrong:
            problems.append(_misplaced(wrong[0], letter, f"{_MEANING[letter]} stands {where}, once"))
    first_module = letters.find("m")
    if 0 <= first_module < letters.rfind("t"):
        late = letters.index("t", first_module)
        problems.append(_misplaced(symbols[late][1], "t", "layers come before MTP modules"))
    return problems


def _count_problems(symbols: Sequence[_Symbol], num_layers: int, num_mtp: int) -> list[Problem]:
    problems = []
    for letter, wanted, path in (("t", num_layers, "model.num_layers"), ("m", num_mtp, "model.num_mtp")):
        found = sum(symbol == letter for symbol, _ in symbols)
        if found != wanted:
            fix = f"write {wanted} {letter} in all" if wanted else f"leave {letter} out"
            problems.append(Problem(PATH, f"{found:,} {letter}, but {path} is {wanted:,}", fix))
    return problems


def _misplaced(at: int, letter: str, rule: str) -> Problem:
    return Problem(PATH, f"character {at + 1} ({letter!r}) is out of place: {rule}", "move or remove it")


def _wrong(text: str, at: int, what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(PATH, f"character {at + 1} ({text[at]!r}) of {_brief(text)!r} {what}", fix))


def _brief(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
