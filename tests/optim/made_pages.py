"""Markdown of notes that are made of the package: tables, and docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

#: The sections of docstrings.  Arguments, errors and examples are for ``help()`` and the site's page of public names.
_HEAD = re.compile("(Args|Attributes|Raises|Returns|Example):")
_LEFT_OUT = ("Args", "Raises", "Example")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table; cells have no line ends."""
    top, *lines = (f"| {' | '.join(line)} |\n" for line in (head, *rows))
    return "".join([top, "|---" * len(head) + "|\n", *lines])


def call_of(function: Callable[..., Any], on: str) -> str:
    """How a method is called, without types."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    given = [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]
    return f"{on}.{function.__name__}({', '.join(given)})"


def text_of(thing: Any) -> str:
    """The docstring of a method or class, without arguments, errors and examples."""
    found: list[str] = []
    for section, lines in sections_of(inspect.getdoc(thing) or "").items():
        if section in _LEFT_OUT:
            continue
        if section == "Attributes":
            found.append("\n".join(map(_item, entries_of(lines))))
        else:
            paragraphs = "\n".join(lines).split("\n\n")
            if section == "Returns":
                paragraphs[0] = f"Returns {paragraphs[0]}"
            found += [_paragraph(each) for each in paragraphs if each.strip()]
    return "\n\n".join(found) + "\n"


def sections_of(doc: str) -> dict[str, list[str]]:
    """The lines of each section, "" for those before the first."""
    found: dict[str, list[str]] = {"": []}
    section = ""
    for line in doc.splitlines():
        if head := _HEAD.fullmatch(line):
            section = head[1]
            found[section] = []
        else:
            found[section].append(line)
    return {name: textwrap.dedent("\n".join(lines)).strip("\n").splitlines() for name, lines in found.items()}


def entries_of(lines: Iterable[str]) -> list[tuple[str, str]]:
    """(names, text) of each entry of a section; its further lines are indented."""
    found: list[str] = []
    for line in lines:
        if line.startswith(" "):
            found[-1] += " " + line.strip()
        elif line:
            found.append(line)
    return [(names, text.strip()) for names, _, text in (each.partition(":") for each in found)]


def _item(entry: tuple[str, str]) -> str:
    names, text = entry
    shown = ", ".join(f"`{name}`" for name in names.split(", "))
    return _wrapped(f"{shown}: {text}", "* ", "  ")


def _paragraph(text: str) -> str:
    """Text, or a list with stars."""
    if not text.startswith("* "):
        return _wrapped(text)
    return "\n".join(_wrapped(item.removeprefix("* "), "* ", "  ") for item in re.split(r"\n(?=\* )", text))


def _wrapped(text: str, first: str = "", later: str = "") -> str:
    """A paragraph of a docstring as one of Markdown."""
    text = re.sub(r":(?:meth|func):`~?(?:[\w.]*\.)?(\w+)`", r"`\1()`", text)
    text = re.sub(r":class:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    whole = textwrap.TextWrapper(
        120, initial_indent=first, subsequent_indent=later, break_on_hyphens=False, break_long_words=False
    )
    return whole.fill(" ".join(text.replace("``", "`").split()))
