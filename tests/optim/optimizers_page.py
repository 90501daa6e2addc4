"""The table of ``notes/optimizers.md``: every rule that ships.  To write it anew:

PYTHONPATH=.:tests/helpers python -m tests.optim.optimizers_page
"""

from __future__ import annotations

import importlib
import inspect
import json

import torch
from paths import ROOT

from pagedopt.formats.choice import Choice, State
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.int8 import INT8
from pagedopt.optim.registry import OPTIMIZERS, RULE_NAMES
from pagedopt.optim.rule_optimizer import LARGE
from pagedopt.rules import RULES, Rule
from tests.optim.made_pages import table

PAGE = ROOT / "notes" / "optimizers.md"
BEGIN, END = "<!-- begin rules -->\n", "<!-- end rules -->\n"
HEAD = ("rule", "paper", "state", "float32", "int8", "of a copy")
MEASURED = ROOT / "experiments" / "results" / "every_optimizer-nvidia-h200.json"


def paper_of(rule: Rule) -> str:
    """What a rule's module names in the first parentheses of its docstring."""
    text = inspect.getdoc(importlib.import_module(rule.function.__module__)) or ""
    return " ".join(text.partition("(")[2].partition(")")[0].split())


def bytes_of(rule: Rule, choice: Choice | None) -> str:
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


def shares() -> dict[str, str]:
    """Of each rule that was timed: the time of a copy of a step's bytes over the step's, by the GPU."""
    rows = json.loads(MEASURED.read_text())["parts"]["every_optimizer"]["rows"]
    times = {(row["key"], row["case"] == row["key"]): row["gpu"]["median"] for row in rows}
    states, found = {row["key"]: row["states"] for row in rows}, dict[str, str]()
    for entry in (each for each in OPTIMIZERS if each.name in states):
        rule = next(name for name in entry.rules if len(RULES[name].inputs) - 2 == states[entry.name])
        found[rule] = f"{100 * times[entry.name, False] / times[entry.name, True]:.0f} %"
    return found


def text() -> str:
    """The generated part: a row for each rule."""
    rows, papers, measured = [], set[str](), shares()
    for name in RULE_NAMES:
        rule = RULES[name]
        file = rule.function.__module__.replace(".", "/")
        states = ", ".join(f"`{state}`" for state in (*rule.inputs[2:], *rule.carried))
        paper = "" if (found := paper_of(rule)) in papers else found
        papers.add(found)
        stored = bytes_of(rule, None), bytes_of(rule, INT8)
        rows.append((f"[{name}](../{file}.py)", paper, states, *stored, measured.get(name, "")))
    return table(HEAD, rows)


def page() -> str:
    """The page with its generated part anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{text()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
