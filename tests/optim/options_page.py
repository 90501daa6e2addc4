"""``notes/options.md``: the options of all optimizers, as ``pagedopt/optim/options.py`` says them.  To write it anew:

PYTHONPATH=.:tests/helpers python -m tests.optim.options_page
"""

from __future__ import annotations

from collections.abc import Iterable

from paths import ROOT

from pagedopt.optim.options import TABLE
from tests.optim.made_pages import table

PAGE = ROOT / "notes" / "options.md"
_HEAD = """\
# Options of every optimizer

Made by `tests/optim/options_page.py` of `pagedopt/optim/options.py`; do not edit. They are keywords of every
optimizer, as in `PagedAdamW(params, lr=1e-3, device_budget="2GiB")`; to a type checker they are `pagedopt.Options`.
None of them but the first five and `max_grad_norm` changes a bit of a step. [paged_state.md](paged_state.md) measures
what they cost.
"""


def page() -> str:
    rows = [
        (f"`{name}`", option.range or _code(option.taken), f"`{option.written}`", option.what)
        for name, option in TABLE.items()
    ]
    parts = [_HEAD, table(("option", "values", "default", "what it says"), rows)]
    for name, option in TABLE.items():
        rows = [(_code([value]), meaning) for value, meaning in option.values.items()]
        parts.append(f"## {name}\n\n" + table((f"`{name}=`", "means"), rows))
    return "\n".join(parts)


def _code(values: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for value in values for each in value.split(", "))


if __name__ == "__main__":
    PAGE.write_text(page())
