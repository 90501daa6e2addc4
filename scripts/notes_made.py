"""Notes that are made of the package: ``methods.md``, ``options.md`` and the table of ``optimizers.md``.

python scripts/notes_made.py        # writes them anew
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from pagedopt import MemoryReport, PagedOptimizer
from pagedopt.formats.choice import Choice, State
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.int8 import INT8
from pagedopt.optim.options import TABLE
from pagedopt.optim.overlap.overlap import OverlapReport
from pagedopt.optim.registry import OPTIMIZERS, RULE_NAMES
from pagedopt.optim.rule_optimizer import LARGE
from pagedopt.rules import RULES, Rule

ROOT = Path(__file__).resolve().parents[1]
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


# --- methods ----------------------------------------------------------------------------------------------------------

_METHODS_HEAD = """\
# Methods of every optimizer

Made by `scripts/notes_made.py` of docstrings; do not edit. Arguments, errors and examples:
`help(pagedopt.PagedAdamW.attach)`, or the page of public names on the site (`make docs`). Methods of torch's optimizers
are the same and, but for state dicts, not listed. [options.md](options.md) has the options, [hiding.md](hiding.md) more
on `attach`.
"""
#: Methods by what they are for; a report's class stands behind the method that returns it.
PARTS: dict[str, tuple[Any, ...]] = {
    "Memory": (
        PagedOptimizer.memory_report, MemoryReport, PagedOptimizer.set_device_budget, PagedOptimizer.spill,
        PagedOptimizer.unspill, PagedOptimizer.spilled, PagedOptimizer.guard,
    ),
    "The update under the next forward": (
        PagedOptimizer.attach, PagedOptimizer.start, PagedOptimizer.wait, PagedOptimizer.waited,
        PagedOptimizer.overlap_report, OverlapReport,
        PagedOptimizer.watch_reads, PagedOptimizer.detach,
    ),
    "Checkpoints": (
        PagedOptimizer.state_dict, PagedOptimizer.decoded_state_dict, PagedOptimizer.load_state_dict,
    ),
    "Parameters in 16 bits, of which nothing is lost": (
        PagedOptimizer.master, PagedOptimizer.master_state_dict, PagedOptimizer.load_master,
        PagedOptimizer.reset_master,
    ),
    "An average of the weights": (PagedOptimizer.averaged,),
    "A second rule": (PagedOptimizer.apply,),
    "CUDA graphs": (PagedOptimizer.refresh, PagedOptimizer.check_capture),
}  # fmt: skip


def methods() -> str:
    """``notes/methods.md``: what optimizers offer beside torch's, as their docstrings say it."""
    parts = [_METHODS_HEAD]
    for heading, things in PARTS.items():
        parts.append(f"## {heading}\n")
        for thing in things:
            how = f"What `{things[things.index(thing) - 1].__name__}()` returns:" if isinstance(thing, type) else ""
            how = how or f"    {call_of(thing, 'optimizer')}"
            parts.append(f"### {thing.__name__}\n\n{how}\n\n{text_of(thing)}")
    return "\n".join(parts)


# --- options ----------------------------------------------------------------------------------------------------------

_OF_OPTIONS = """\
# Options of every optimizer

Made by `scripts/notes_made.py` of `pagedopt/optim/options.py`; do not edit. They are keywords of every
optimizer, as in `PagedAdamW(params, lr=1e-3, device_budget="2GiB")`; to a type checker they are `pagedopt.Options`.
None of them but the first five and `max_grad_norm` changes a bit of a step. [paged_state.md](paged_state.md) measures
what they cost.
"""


def options() -> str:
    """``notes/options.md``: the options of all optimizers, as ``pagedopt/optim/options.py`` says them."""
    rows = [(f"`{name}`", f"`{option.written}`", option.what) for name, option in TABLE.items()]
    parts = [_OF_OPTIONS, table(("option", "default", "what it says"), rows)]
    for name, option in TABLE.items():
        meanings = [(_code(value), meaning) for value, meaning in option.values.items()]
        range_ = f"Values: {option.range}.\n\n" if option.range else ""
        parts.append(f"## {name}\n\n{range_}" + table((f"`{name}=`", "means"), meanings))
    return "\n".join(parts)


def _code(values: str) -> str:
    return ", ".join(f"`{each}`" for each in values.split(", "))


# --- rules ------------------------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- begin rules -->\n", "<!-- end rules -->\n"
_RULE_COLUMNS = ("rule", "paper", "state", "float32", "int8", "of a copy")
_MEASURED = ROOT / "experiments" / "results" / "every_optimizer-nvidia-h200.json"


def _paper_of(rule: Rule) -> str:
    """What a rule's module names in the first parentheses of its docstring.

    Raises:
        ValueError: it names nothing.
    """
    text = inspect.getdoc(importlib.import_module(rule.function.__module__)) or ""
    if not (paper := " ".join(text.partition("(")[2].partition(")")[0].split())):
        raise ValueError(f"{rule.function.__module__} begins with {text[:60]!r}; write: Name (Authors year, arXiv:…)")
    return paper


def _bytes_of(rule: Rule, choice: Choice | None) -> str:
    """Bytes of state a parameter, as float32 or by a choice; or the state that it cannot store."""
    total = 0.0
    for name in rule.inputs[2:]:
        try:
            made = choice.of(State(name, LARGE, rule.name, rule.moments.get(name))) if choice else torch.float32
        except ValueError:
            return f"not `{name}`"
        form = of_dtype(made) if isinstance(made, torch.dtype) else made
        total += sum(column.dtype.itemsize / column.per for column in form.columns)
    return f"{total:.3g}"


def _shares() -> dict[str, str]:
    """Of each rule that was timed: the time of a copy of a step's bytes over the step's, by the GPU."""
    rows = json.loads(_MEASURED.read_text())["parts"]["every_optimizer"]["rows"]
    times = {(row["key"], row["case"] == row["key"]): row["gpu"]["median"] for row in rows}
    states, found = {row["key"]: row["states"] for row in rows}, dict[str, str]()
    for entry in (each for each in OPTIMIZERS if each.name in states):
        rule = next(name for name in entry.rules if len(RULES[name].inputs) - 2 == states[entry.name])
        found[rule] = f"{100 * times[entry.name, False] / times[entry.name, True]:.0f} %"
    return found


def _rows() -> str:
    """A row for each rule."""
    rows, papers, measured = [], set[str](), _shares()
    for name in RULE_NAMES:
        rule = RULES[name]
        file = rule.function.__module__.replace(".", "/")
        states = ", ".join(f"`{state}`" for state in (*rule.inputs[2:], *rule.carried))
        paper = "" if (found := _paper_of(rule)) in papers else found
        papers.add(found)
        stored = _bytes_of(rule, None), _bytes_of(rule, INT8)
        rows.append((f"[{name}](../{file}.py)", paper, states, *stored, measured.get(name, "")))
    return table(_RULE_COLUMNS, rows)


def optimizers() -> str:
    """``notes/optimizers.md``, with its table of every rule that ships anew."""
    before, _, rest = file_of("optimizers").read_text().partition(_BEGIN)
    return f"{before}{_BEGIN}{_rows()}{_END}{rest.partition(_END)[2]}"


PAGES: dict[str, Callable[[], str]] = {"methods": methods, "options": options, "optimizers": optimizers}


def file_of(name: str) -> Path:
    return ROOT / "notes" / f"{name}.md"


if __name__ == "__main__":
    for name, made in PAGES.items():
        file_of(name).write_text(made())
