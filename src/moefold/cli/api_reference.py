"""Write the API reference from docstrings: `python -m moefold.cli.api_reference > docs/api.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import moefold

HEAD = f"""# Python API

<!-- Written by `python -m moefold.cli.api_reference > docs/api.md`; a test holds that this page is what it writes. -->

What `import moefold` offers, version {moefold.__version__.rpartition(".")[0]}. These names and the keys of the
configuration follow semantic versioning; everything else is internal. Importing moefold imports nothing heavy, and
`load_run`, `check` and `plan` need no torch. Every example below is run by a test; `tmp` stands for a directory.

Scripts that teach, each under a minute on a laptop:

- `examples/moe_layer.py`: call one MoE layer.
- `examples/own_router.py`: an own router in 30 lines, proven on 4 ranks.
- `examples/own_callback.py`: train in a script, with an own callback and metric.
- `examples/plan_layouts.py`: plan in a loop over layouts, and plot it.
"""


# Objects that others make: their constructors are internal.
MADE_ELSEWHERE = ("MoELayer", "LanguageModel", "Plan", "Verdict", "Control", "RoutingPolicy", "MoefoldError")
_WIDEST = 100


def reference() -> str:
    """The whole page."""
    links = " · ".join(f"[{name}](#{_anchor(name)})" for name in moefold.__all__)
    return "\n".join([HEAD, links, "", *(line for name in moefold.__all__ for line in _entry(name))])


def _heading(name: str) -> str:
    """Headings that differ in case only would get anchors that GitHub and the docs site number differently."""
    earlier = moefold.__all__[: moefold.__all__.index(name)]
    return f"class {name}" if name.lower() in (other.lower() for other in earlier) else name


def _anchor(name: str) -> str:
    return _heading(name).lower().replace(" ", "-")


def _entry(name: str) -> Iterator[str]:
    found = getattr(moefold, name)
    yield from (f"## {_heading(name)}", "")
    if name not in MADE_ELSEWHERE:
        yield from ("```python", f"{name}{_arguments(found)}", "```", "")
    yield from _prose(inspect.getdoc(found) or "")
    if inspect.isclass(found):
        for member, value in vars(found).items():
            yield from _member(name, member, value)


def _member(owner: str, member: str, value: object) -> Iterator[str]:
    """Own methods and properties that are public and have a docstring."""
    value = value.__func__ if isinstance(value, classmethod) else value
    is_property = isinstance(value, property)
    if member.startswith("_") or not (is_property or inspect.isfunction(value)) or not value.__doc__:
        return
    title = f"`{owner}.{member}`" if is_property else f"`{owner}.{member}{_arguments(value, fold=False)}`"
    first, *rest = _prose(inspect.cleandoc(value.__doc__))
    yield from (f"- {title}: {first}", *(f"  {line}" if line else "" for line in rest))


def _arguments(found: object, fold: bool = True) -> str:
    """The signature as the source has it, one line per argument where it is long."""
    signature = inspect.signature(found)  # type: ignore[arg-type]
    words: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls", "_cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(_argument(parameter))
    returned = "" if signature.return_annotation in (signature.empty, None, "None") else signature.return_annotation
    arrow = f" -> {returned}" if returned else ""
    line = f"({', '.join(words)}){arrow}"
    if not fold or len(line) < _WIDEST:
        return line
    return "(\n" + "".join(f"    {word},\n" for word in words) + f"){arrow}"


def _argument(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    annotation = getattr(annotation, "__forward_arg__", annotation)
    text = ("**" if parameter.kind is parameter.VAR_KEYWORD else "") + parameter.name
    text += "" if annotation is parameter.empty else f": {annotation}"
    if parameter.default is parameter.empty:
        return text
    # A factory's default has no name.
    default = "..." if "factory" in repr(parameter.default) else repr(parameter.default)
    return f"{text} = {default}"


def _prose(text: str) -> list[str]:
    """A docstring as Markdown: examples become code blocks."""
    lines: list[str] = []
    in_example = False
    for line in text.splitlines():
        starts = line.startswith(">>> ")
        if starts and not in_example:
            lines.append("```python")
            in_example = True
        elif in_example and not line:
            lines.append("```")
            in_example = False
        lines.append(line if in_example else line.replace("``", "`"))
    return [*lines, *(["```"] if in_example else []), ""]


if __name__ == "__main__":
    print(reference(), end="")
