"""``notes/options.md``: the options of all optimizers, as ``pagedopt/optim/options.py`` says them.  To write it anew:

PYTHONPATH=.:tests/helpers python -m tests.optim.options_page
"""

from __future__ import annotations

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
    rows = [(f"`{name}`", f"`{option.written}`", option.what) for name, option in TABLE.items()]
    parts = [_HEAD, table(("option", "default", "what it says"), rows)]
    for name, option in TABLE.items():
        meanings = [(_code(value), meaning) for value, meaning in option.values.items()]
        range_ = f"Values: {option.range}.\n\n" if option.range else ""
        parts.append(f"## {name}\n\n{range_}" + table((f"`{name}=`", "means"), meanings))
    return "\n".join(parts)


def _code(values: str) -> str:
    return ", ".join(f"`{each}`" for each in values.split(", "))


if __name__ == "__main__":
    PAGE.write_text(page())
