"""When is func3, pasted from the text of func1 and func2, what one does after the other?

Answer: see notes/custom_op.md.

Two kernels as text (``works/pasted_text.py``) are launched one after the other, and pasted to one, in Numba, Triton and
CUDA C++.  *Right* has the same bits.  Beside each, the same as rules, in two launches and composed to one.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab import Page, Row, Rows, Run
from experiments.works.pasted_cases import CASES, as_rules, as_text
from experiments.works.pasted_text import CUDA, LANGUAGES, NUMBA, TRITON
from pagedopt import RuleError

MEASURES = ("kernels",)
NOTE = "custom_op"
RIGHT, WRONG, REFUSED, RULES = "right", "wrong, without a word", "refused", "rules, composed (ours)"


def measure(run: Run) -> Iterator[Row]:
    """A row per language and case."""
    languages = [NUMBA] if run.device.type == "cpu" else [TRITON, CUDA]
    if left := [language for language in LANGUAGES if language not in languages]:
        run.leave_out(f"{', '.join(left)}: {'need a GPU' if run.device.type == 'cpu' else 'is for the CPU'}")
    for language in (*languages, RULES):
        for case in run.each(CASES):
            same = as_rules(case, run.device) if language == RULES else as_text(language, case, run.device)
            found, said = REFUSED, ""
            try:
                found = RIGHT if same() else WRONG
            except Exception as error:  # a compiler's may be anything
                lines = [line for line in str(error).splitlines() if "error" in line or "cannot" in line]
                said = f"{type(error).__name__}: {(lines or [''])[0].rpartition('/')[2]}"[:160]
                expected = (RuleError,) if language == RULES else (Exception,)
                found = REFUSED if isinstance(error, expected) else WRONG
            yield {"language": language, "case": case, "device": run.device.type, "found": found, "said": said}


def derive(rows: Rows) -> Rows:
    """Whether it is wrong without a word."""
    return Rows({**row, "silent": int(row["found"] == WRONG)} for row in rows)


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.grid("func1 and func2 as one, on {device}", rows, "case", "language", "found", "what they are", str)
    page.detail.table("func1 and func2 as one, in {language} on {device}", rows,
        {"what they are": "case", "pasted, or composed": "found", "in words": "said"}, by=("language", ))  # fmt: skip
    page.bar("composed rules that are wrong without a word", rows.where(language=RULES),
        lambda rows: sum(row["silent"] for row in rows), at_most=0)  # fmt: skip
    page.bar(
        "pasted texts that are wrong without a word",
        rows,
        lambda rows: max(
            sum(row["silent"] for row in rows if row["language"] == language) for language in rows.values("language")
        ),
        at_least=4,
    )
