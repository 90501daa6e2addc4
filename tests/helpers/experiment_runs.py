"""Experiments by their names, what their rows say, and pages without what changes from day to day."""

from __future__ import annotations

import re
from types import ModuleType

from experiments import kept


def experiment(name: str) -> kept.Experiment:
    """By its name."""
    found = kept.find(name)
    assert found is not None
    return found[0]


def asked(name: str) -> ModuleType:
    """A question by its name."""
    return experiment(name).questions[name]


def undated(text: str) -> str:
    """A page without what has changed since it was measured, which pages of before said."""
    return re.sub(r"; what has changed since is unknown|; [\w ,]+ changed since| Changed since: [^.\n]+\.", "", text)


def emptied(text: str) -> str:
    """A note with nothing between its markers."""
    return re.sub(r"(?s)(<!-- begin (.*?) -->\n).*?(?=<!-- end \2 -->)", r"\1", text)
