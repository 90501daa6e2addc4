"""Reports that notebooks and rich show as tables."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


class Shown:
    """A report with a title and facts (name and text), which ``rich.print`` and notebooks show as a table."""

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        """Return the title and the (name, text) of each fact in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        title, facts = self.facts()
        return "\n".join([title, *(f"  {name}: {text}" for name, text in facts)])

    def __rich__(self) -> Table:
        return facts_table(*self.facts())

    def _repr_html_(self) -> str:
        title, facts = self.facts()
        rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in facts)
        return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def facts_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """Return a table of facts, each a name and a text."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(escape(name), escape(text))
    return table
