"""List the experiments, or run one by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from pagedopt.commands.process import end, process

#: What measures nothing: its module and function, and what it does.
PAGES = {
    "readme": ("readme", "main", "fill README.md with what is kept, and draw its picture"),
    "drawings": ("drawings", "main", "draw how it works, from the code's own values"),
    "lecture": ("lecture.page", "main", "write notes/lecture.md, what the lectures claim, from results that are kept"),
    "release_check": ("release_check", "main", "fail on what is quoted and has changed since it was measured"),
    "fingerprints": ("release_check", "store", "store in what is kept what the tree of its commit measured"),
}


def main(arguments: Sequence[str]) -> int:
    """``python -m experiments [NAME [OPTIONS]]``"""
    from experiments.harness import question
    from experiments.harness.main import Parser
    from experiments.harness.main import main as run

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says on stderr when it begins and ends
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m experiments NAME [--help]\n")
        for experiment in question.every():
            print(f"  {experiment.name:20} {experiment.title}")
            if takes := experiment.takes:
                print(f"  {'':20} {takes}")
        print("", *(f"  {page:20} {what}" for page, (_, _, what) in PAGES.items()), sep="\n")
        return 0
    name, *rest = arguments[0].replace("-", "_"), *arguments[1:]
    if name in PAGES:
        module, function, what = PAGES[name]
        Parser(prog=f"python -m experiments {name}", description=what).parse_args(rest)
        return int(getattr(importlib.import_module(f"experiments.{module}"), function)())
    found = question.find(name)
    if found is None:
        names = ", ".join(experiment.name for experiment in question.every())
        meant = f" (did you mean {' or '.join(near)}?)" if (near := question.near(name)) else ""
        print(f"there is no experiment {arguments[0]!r}{meant}; there are {names}", file=sys.stderr)
        return 2
    experiment, part = found
    return run(experiment, rest, part)


def load() -> Sequence[str]:
    """Import what takes long; returns the arguments."""
    import experiments.harness.main  # noqa: F401

    return sys.argv[1:]


if __name__ == "__main__":
    end(process("experiments", load, main))
