"""``notes/methods.md``: what optimizers offer beside torch's, as their docstrings say it.  To write it anew:

PYTHONPATH=.:tests/helpers python -m tests.optim.methods_page
"""

from __future__ import annotations

from typing import Any

from paths import ROOT

from pagedopt import MemoryReport, PagedOptimizer
from pagedopt.optim.overlap.overlap import OverlapReport
from tests.optim.made_pages import call_of, text_of

PAGE = ROOT / "notes" / "methods.md"
_HEAD = """\
# Methods of every optimizer

Made by `tests/optim/methods_page.py` of docstrings; do not edit. Arguments, errors and examples:
`help(pagedopt.PagedAdamW.attach)`, or the page of public names on the site (`make docs`). Methods of torch's optimizers
are the same and, but for state dicts, not listed. [options.md](options.md) has the options, [hiding.md](hiding.md) more
on `attach`.
"""
#: Methods by what they are for; behind one the class of what it returns.
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


def page() -> str:
    """The text of the page."""
    parts = [_HEAD]
    for heading, things in PARTS.items():
        parts.append(f"## {heading}\n")
        for thing in things:
            how = f"What `{things[things.index(thing) - 1].__name__}()` returns:" if isinstance(thing, type) else ""
            how = how or f"    {call_of(thing, 'optimizer')}"
            parts.append(f"### {thing.__name__}\n\n{how}\n\n{text_of(thing)}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
