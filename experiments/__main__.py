"""List the experiments, or run one by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from experiments import readme
from experiments.harness import question
from experiments.harness.main import main as run
from experiments.lecture import page as lecture


def main(arguments: Sequence[str]) -> int:
    """``python -m experiments [NAME [OPTIONS]]``"""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says on stderr when it begins and ends
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m experiments NAME [--help]\n")
        for experiment in question.every():
            print(f"  {experiment.name:20} {experiment.title}")
        print(f"\n  {'readme':20} fill README.md with what is kept, and draw its picture")
        print(f"  {'lecture':20} write notes/lecture.md, what the lectures claim, from results that are kept")
        return 0
    name, *rest = arguments[0].replace("-", "_"), *arguments[1:]
    if name == "lecture":
        return lecture.main()
    if name == "readme":
        return readme.main()
    found = question.find(name)
    if found is None:
        names = ", ".join(experiment.name for experiment in question.every())
        print(f"there is no experiment {arguments[0]!r}; there are {names}", file=sys.stderr)
        return 2
    experiment, part = found
    return run(experiment, rest, part)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
