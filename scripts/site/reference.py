"""The API reference: a page for each package that has public names, from their signatures and docstrings.

Docstrings are written for a terminal. Lines of a name, two blanks or more and what it means become a table.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import typing
from collections.abc import Collection, Iterator
from typing import Any

from shardwright.plugins.settings import HybridSettings

# module -> its names; None: all that it exports
PUBLIC: dict[str, tuple[str, ...] | None] = {
    "shardwright": None,
    "shardwright.booster": None,
    "shardwright.plugins": None,
    "shardwright.trainer": None,
    "shardwright.cluster": None,
    "shardwright.interface": None,
    "shardwright.optim": None,
    "shardwright.lazy": None,
    "shardwright.checkpoint.preemption": ("SaveOnSignal",),
    "shardwright.shardformer": None,
    "shardwright.pipeline.timeline": ("Timeline", "Recorder", "MeasuredSpan"),
    "shardwright.testing": None,
    "shardwright.utils": None,
}
_ROW = re.compile(r"^(\S+(?: \S+)*?) {2,}(\S.*)$")
_CODE = re.compile(r"`[^`\n]+`")


def pages() -> dict[str, str]:
    """Path in the site -> Markdown."""
    found = {f"reference/{module.partition('.')[2] or module}.md": page(module) for module in PUBLIC}
    found["reference/index.md"] = _contents(found)
    return found


def names_of(module: str) -> tuple[str, ...]:
    names = PUBLIC[module]
    exported = importlib.import_module(module).__all__ if names is None else names
    return tuple(name for name in exported if not name.startswith("__"))


def page(module: str) -> str:
    names = names_of(module)
    objects = {name: getattr(importlib.import_module(module), name) for name in names}
    classes = [what for what in objects.values() if inspect.isclass(what)]
    parts = [f"# {module}", described(importlib.import_module(module))]
    for name in sorted(names, key=str.lower):
        parts += (
            _class(name, objects[name], classes)
            if inspect.isclass(objects[name])
            else _function(name, objects[name], "##")
        )
    return "\n\n".join(part for part in parts if part) + "\n"


def described(what: Any) -> str:
    """The docstring as Markdown; empty where there is none of its own."""
    text = what.__doc__ if inspect.isclass(what) else inspect.getdoc(what)
    if not text or (dataclasses.is_dataclass(what) and text.startswith(f"{getattr(what, '__name__', '')}(")):
        return ""
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n[ \t]*\n", inspect.cleandoc(text)))


def _contents(found: dict[str, str]) -> str:
    rows = [
        "# API reference",
        "Made from the docstrings of the public names. What is not listed here may change without notice.",
        "| module | names |\n|---|---|",
    ]
    for (module, _), path in zip(PUBLIC.items(), list(found), strict=False):
        names = ", ".join(f"`{name}`" for name in sorted(names_of(module), key=str.lower))
        rows[-1] += f"\n| [{module}]({path.removeprefix('reference/')}) | {names} |"
    return "\n\n".join(rows) + "\n"


def _class(name: str, what: Any, neighbours: Collection[Any]) -> list[str]:
    parts = [f"## {name}", _signature(name, what), described(what)]
    if name == "HybridParallelPlugin":
        parts += list(_options())
    if issubclass(what, enum.Enum):
        return [*parts, "\n".join(f"- `{member.name}` = `{member.value!r}`" for member in what)]
    known = [base for base in what.__mro__[1:] if base in neighbours]
    if known:
        parts.append(f"Has what [{known[0].__name__}](#{known[0].__name__.lower()}) has, too.")
    for own, value in _members(what, known):
        if isinstance(value, property):
            parts += [f"### {name}.{own}", described(value.fget)]
        else:
            parts += _function(f"{name}.{own}", value, "###")
    return parts


def _function(name: str, what: Any, level: str) -> list[str]:
    shown = name.rpartition(".")[2]
    return [f"{level} {name}", _signature(shown, what) if callable(what) else "", described(what)]


def _members(what: type, known: Collection[type]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties in the order of the code, those of bases included that are not `known`."""
    seen: set[str] = set()
    for base in what.__mro__:
        if base in known or not base.__module__.startswith("shardwright"):
            continue
        for name, value in vars(base).items():
            value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if (
                not name.startswith("_")
                and name not in seen
                and (inspect.isfunction(value) or isinstance(value, property))
            ):
                seen.add(name)
                yield name, value


def _options() -> Iterator[str]:
    """The arguments of the plugin, which are documented in the groups that they are dealt to."""
    for field in dataclasses.fields(HybridSettings):
        group = typing.get_type_hints(HybridSettings)[field.name]
        if dataclasses.is_dataclass(group):
            documented = [one for one in group.__mro__ if dataclasses.is_dataclass(one) and vars(one).get("__doc__")]
            yield f"### Options: {field.name}"
            yield from (described(one) for one in documented)


def _signature(name: str, what: Any) -> str:
    try:
        signature = inspect.signature(what)
    except (ValueError, TypeError):
        return ""
    if inspect.isclass(what) and issubclass(what, (enum.Enum, BaseException)):
        return ""
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    signature = signature.replace(
        parameters=parameters,
        return_annotation=signature.empty if inspect.isclass(what) else signature.return_annotation,
    )
    text = _plain(f"{name}{signature}")
    if len(text) > 88 and parameters:
        marks, lines = {inspect.Parameter.KEYWORD_ONLY: "*"}, []
        starred = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)
        for one in parameters:
            if one.kind in marks and not starred:
                lines.append(f"    {marks.pop(one.kind)},")
            lines.append(f"    {_plain(str(one))},")
        answer = (
            "" if signature.return_annotation is signature.empty else f" -> {_plain(str(signature.return_annotation))}"
        )
        text = "\n".join([f"{name}(", *lines, f"){answer}"])
    return f"```python\n{text}\n```"


def _plain(text: str) -> str:
    """Annotations are strings, and shown without their quotes; defaults keep theirs."""
    return re.sub(r"(: |-> |^)(?:ForwardRef\()?'([^']*)'\)?", r"\1\2", text)


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    rows = [_ROW.match(line) for line in lines]
    first = next((number for number, row in enumerate(rows) if row), None)
    if first is None:
        indented = all(line.startswith("    ") or not line for line in lines)
        return f"```text\n{inspect.cleandoc(text)}\n```" if indented else _escaped(text)
    table: list[list[str]] = []
    waiting = ""  # a name that is too long for its column has its meaning below
    for line, row in zip(lines[first:], rows[first:], strict=True):
        if row:
            table.append([row[1], row[2]])
        elif line.startswith(" ") and waiting:
            table.append([waiting, line.strip()])
            waiting = ""
        elif line.startswith(" "):
            table[-1][1] += f" {line.strip()}"
        else:
            waiting = line.strip()
    cells = [f"| {_name(name)} | {_escaped(meaning).replace('|', chr(92) + '|')} |" for name, meaning in table]
    before = [_escaped("\n".join(lines[:first]))] if first else []
    after = [_escaped(waiting)] if waiting else []
    return "\n\n".join([*before, "\n".join(["| | |", "|---|---|", *cells]), *after])


def _name(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if "`" not in text else text


def _escaped(text: str) -> str:
    """Outside of code nothing in a docstring is meant as Markdown."""
    parts, at = [], 0
    for code in [*_CODE.finditer(text), None]:
        end = code.start() if code else len(text)
        parts.append(re.sub(r"([*_<\[\]])", r"\\\1", text[at:end]))
        if code:
            parts.append(code[0])
            at = code.end()
    return "".join(parts)
