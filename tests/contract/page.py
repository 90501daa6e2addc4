"""``notes/contract.md``: what is done to an optimizer, and where ours does not do what torch's does.  To write it anew:

    PYTHONPATH=.:tests/helpers:tests/contract python -m tests.contract.page

It is made of scenarios and listed differences alone, as ``tests/contract`` holds both. A scenario without a
difference is only counted: it is as in torch, in each placement.
"""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path

from pagedopt.optim.registry import OPTIMIZERS
from tests.contract.differences import DIFFERENCES, Difference
from tests.contract.scenarios import PLACES, SCENARIOS, Scenario

PAGE = Path(__file__).resolve().parents[2] / "notes" / "contract.md"
#: In which order files of scenarios (``tests/contract/test_contract_*.py``) are on it.
FILES = (
    "checkpoints", "hyperparameters", "flags", "gradients", "loops", "objects", "parameters", "schedules",
)  # fmt: skip
for _file in FILES:
    importlib.import_module(f"test_contract_{_file}")
_TORCHS = {entry.name for entry in OPTIMIZERS if entry.torch}
_HEAD = """\
# The contract: where these optimizers differ from torch's

Made by `tests/contract/page.py`; do not edit. `tests/contract` runs {scenes} scenarios with torch's class and
with ours, in each placement: {places}.
It compares parameters, state, and values and types of errors. In {same} scenarios nothing differs; the lists say, each
once, what does in the others, for all optimizers where none is named (*torch's*: all that torch has, too). Those that
torch lacks are compared with their papers in plain torch.

*Beyond*: ours does what torch refuses, or preserves more. *Refused*: ours refuses what torch does. *Differs*: the
numbers differ.

The numbers of a step, in each placement:

* CPU and CUDA give the same result, bit for bit.
* One float32 step beside torch's default (loop on a CPU, `foreach` on a GPU): `exp_avg` and `momentum_buffer` are equal
  bit for bit. `exp_avg_sq` differs by at most 1 ulp, on a GPU by 2. A parameter differs by at most 5 ulp of the larger
  of it and its update.
* After 1,000 float32 steps the error against float64 is at most that of torch's loop, `foreach` and `fused`
  ([by how much](arithmetic.md)). One exception: `exp_avg_sq` on a GPU, where `fused` has half our error for a beta2 of
  0.95 ([raw](raw/suite-h200-eeffdf8.txt)), and 1.4 times our error for 0.999.
* One bfloat16 or float16 step ends at most 1 ulp from the float64 result rounded to 16 bits.
"""


def page() -> str:
    ordered = sorted(SCENARIOS, key=lambda scene: FILES.index(scene.play.__module__.removeprefix("test_contract_")))
    chapters = dict.fromkeys(scene.chapter for scene in ordered)
    whose: dict[tuple[str, str], set[str]] = {}
    for scene in ordered:
        for entry in OPTIMIZERS:
            for each in _found(scene, entry.name):
                whose.setdefault((each.kind, _limited(each)), set()).add(entry.name)
    parts = [_chapter(chapter, [scene for scene in ordered if scene.chapter == chapter], whose) for chapter in chapters]
    same = sum(not any(_found(scene, entry.name) for entry in OPTIMIZERS) for scene in SCENARIOS)
    places = ", ".join(f"{place.name} ({place.device})" for place in PLACES)
    return "\n".join([_HEAD.format(scenes=len(SCENARIOS), same=same, places=places), *parts])


def _chapter(chapter: str, scenes: list[Scenario], left: dict[tuple[str, str], set[str]]) -> str:
    """What differs and is ``left``, as no earlier chapter has said it; of the rest, the number."""
    lines, differing = [], 0
    for scene in scenes:
        found = [each for entry in OPTIMIZERS for each in _found(scene, entry.name)]
        differing += bool(found)
        for key in dict.fromkeys((each.kind, _limited(each)) for each in found):
            if whose := left.pop(key, None):
                named = f" ({_named(whose)})" if len(whose) < len(OPTIMIZERS) else ""
                lines.append(textwrap.fill(f"* *{key[0].capitalize()}*{named}: {key[1]}", 120, subsequent_indent="  "))
    return "\n".join([f"## {chapter.capitalize()}: {differing} of {len(scenes)}", "", *lines, ""])


def _named(whose: set[str]) -> str:
    """Some classes; those that are missing, if these are fewer."""
    for every, said in ((_TORCHS, "torch's"), ({entry.name for entry in OPTIMIZERS}, "all")):
        if whose <= every and len(rest := every - whose) < len(whose):
            return f"{said}{' but ' * bool(rest)}{', '.join(sorted(rest))}"
    return ", ".join(sorted(whose))


def _found(scene: Scenario, optimizer: str) -> list[Difference]:
    there = [each for each in DIFFERENCES if each.scenario == scene.name and set(each.devices) & set(scene.devices)]
    return [each for each in there if optimizer in (each.optimizers or (optimizer,))]


def _limited(difference: Difference) -> str:
    """Its words, behind the device that alone has it."""
    device = difference.devices[0].upper()
    return difference.words if len(difference.devices) > 1 else f"on {device} alone: {difference.words}"


if __name__ == "__main__":
    PAGE.write_text(page())
