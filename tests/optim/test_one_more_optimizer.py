"""An optimizer is its files, a line in the registry and an entry in ``specs.py``: then every suite runs it.

An AdaBelief is added to a copy of the package and of its tests; of each suite a test of it runs there.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from children import python
from paths import ROOT

ADABELIEF = Path(__file__).with_name("adabelief")
#: What goes over the entries on a CPU.
SUITES = (
    *(str(file.relative_to(ROOT)) for file in (ROOT / "tests/contract").glob("test_*.py")),
    "tests/kernels/test_kernels_cpu.py", "tests/optim/test_golden.py", "tests/optim/test_host_values.py",
    "tests/optim/test_members.py", "tests/optim/test_class_checks.py", "tests/optim/test_shards.py",
    "tests/optim/test_acts.py", "tests/placements/test_shares.py",
)  # fmt: skip
#: A plugin: records the new trajectory, and leaves one test of it in each file; says how many there were.
PLUGIN = """
import collections, json, pathlib
from tests.gpu import captured_toys
from tests.optim import golden

def pytest_configure():
    golden.record()

def pytest_collection_modifyitems(items):
    counts, chosen = collections.Counter(), {}
    for item in items:
        if "adabelief" in item.name.lower():
            file = str(item.path.relative_to(pathlib.Path.cwd()))
            counts[file] += 1
            if not item.get_closest_marker("long") and not item.get_closest_marker("gpu"):
                chosen.setdefault(file, item)
    items[:] = chosen.values()
    pathlib.Path("counts.json").write_text(json.dumps({**counts, "captured": "adabelief" in captured_toys.KINDS}))
"""


def insert(file: Path, before: str, text: str) -> None:
    """Put a text in front of one that a file has once."""
    old = file.read_text()
    assert old.count(before) == 1, f"{file.name} has {before!r} {old.count(before)} times"
    file.write_text(old.replace(before, text + before))


def add_adabelief(tree: Path) -> None:
    """What CONTRIBUTING.md asks of who adds an optimizer."""
    shutil.copy(ADABELIEF / "rule.py", tree / "pagedopt" / "rules" / "adabelief.py")
    shutil.copy(ADABELIEF / "optimizer.py", tree / "pagedopt" / "optim" / "adabelief.py")
    insert(
        tree / "pagedopt/optim/registry.py",
        ")\nRULE_NAMES",
        '    Entry("PagedAdaBelief", "adabelief", ("adabelief",)),\n',
    )
    entry = (ADABELIEF / "entry.py").read_text().partition("\n\n\n")[2]
    insert(tree / "tests/specs.py", "#: By the name of the class.", f"{entry}\n")
    insert(tree / "tests/specs.py", ")}\nCASES", ", ADABELIEF")


@pytest.mark.timeout(240)
def test_every_suite_runs_an_optimizer_that_is_added(tmp_path: Path) -> None:
    away = shutil.ignore_patterns("__pycache__", "*.pt")
    for name in ("pagedopt", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=away)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    add_adabelief(tmp_path)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    path = os.pathsep.join([str(tmp_path), str(tmp_path / "tests/helpers")])
    options = ("-q", "-p", "plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "0")
    said = python("-m", "pytest", *options, *SUITES, cwd=tmp_path, timeout=200, PYTHONPATH=path)
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts.pop("captured")
    assert counts.keys() == set(SUITES), said
    assert f"{len(SUITES)} passed" in said, said
