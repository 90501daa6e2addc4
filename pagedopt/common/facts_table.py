"""Reports that notebooks and rich show as tables."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


class Shown:
    """A report with a title and facts (name and text), which ``rich.print`` and notebooks show as a table."""

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        """Return the title and the (name, text) of each fact in order."""
        raise NotImplementedError

    def __rich__(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        title, facts = self.facts()
        table = Table(title=escape(title), show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in facts:
            table.add_row(escape(name), escape(text))
        return table

    def _repr_html_(self) -> str:
        title, facts = self.facts()
        rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in facts)
        return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"
