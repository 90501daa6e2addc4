"""``scripts/plant_faults.py`` on a small project of its own, and the mutants of ``scripts/mutants.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "scripts"))
import plant_faults
from mutants import Fault, mutants

#: Files by name.  Each test sees one of them, and `test_nothing` none.
PROJECT = {
    "pytest.ini": "[pytest]\npythonpath = .\nmarkers =\n    long\n    clients\n",
    "package.py": "def one():\n    return 1\n\n\ndef one_more():\n    return one() + 1\n",
    "kernel.cu": "x = 1;\n",
    "test_it.py": """
import subprocess, sys
from pathlib import Path

def test_here():
    import package
    assert package.one_more() == 2

def test_elsewhere():
    said = subprocess.check_output([sys.executable, "-c", "import package; print(package.one_more())"])
    assert int(said) == 2

def test_kernel():
    assert Path("kernel.cu").read_text() == "x = 1;\\n"

def test_a_crash():
    import os, package
    package.one() == 1 or os.abort()

def test_a_child_stays():
    import os, time, package
    os.fork() or time.sleep(99)
    assert package.one() == 1

def test_nothing():
    pass
""",
}
ONE = Fault("one is two", "package.py", "return 1", "return 2")
KERNEL = Fault("x is 2", "kernel.cu", "1", "2")


@pytest.fixture
def copy(tmp_path: Path) -> plant_faults.Copy:
    root, folder = tmp_path / "project", tmp_path / "folder"
    for path in (root, folder):
        path.mkdir()
    for name, text in PROJECT.items():
        (root / name).write_text(text)
    for command in (["git", "init", "-q"], ["git", "add", "."]):
        subprocess.run(command, cwd=root, check=True)
    return plant_faults.Copy(root, folder)


def test_a_fault_is_there_wherever_a_test_looks(copy: plant_faults.Copy) -> None:
    for fault, test in ((ONE, "here"), (ONE, "elsewhere"), (KERNEL, "kernel")):
        assert copy.with_fault(fault, f"test_it.py -k {test}").failed == f"test_it.py::test_{test}"
        assert (copy.tree / fault.file).read_text() == PROJECT[fault.file]
    assert copy.with_fault(ONE, "test_it.py -k crash").status < 0
    assert copy.with_fault(ONE, "test_it.py -k stays").seconds < 50
    assert copy.with_fault(ONE, "test_it.py -k nothing").status == plant_faults.PASSED


def test_faults_that_show_nothing_are_refused(copy: plant_faults.Copy) -> None:
    with pytest.raises(RuntimeError, match="stands there 2 times"):
        copy.with_fault(ONE._replace(before="one()"), "test_it.py")
    with pytest.raises(RuntimeError, match="pytest ends with 5 without the fault, not with 0"):
        copy.with_fault(ONE, "test_it.py -k missing")


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("if a < b:\n    c()\n", ["if (not (a < b)):\n    c()\n", "if a <= b:\n    c()\n", "if a < b:\n    pass\n"]),
        ("x = (a if b else c)\n", ["x = (a if (not (b)) else c)\n"]),
        ("x = a and b\n", ["x = True and b\n", "x = a and True\n"]),
        ("x = a or b or c\n", ["x = False or b or c\n", "x = a or b or False\n"]),
        ("x.y = (a or b) is not c\n", [
            "pass\n", "x.y = (False or b) is not c\n", "x.y = (a or False) is not c\n", "x.y = (a or b) is c\n",
        ]),
        ("x += 'é' + b * 2\n", ["pass\n", "x += 'é' - b * 2\n", "x += 'é' + b // 2\n", "x += 'é' + b * 3\n"]),
        ("def f(a: int = 1) -> int:\n    return a\n", ["def f(a: int = 1) -> int:\n    return None\n"]),
        ("for i in x:\n    continue\n", ["for i in x:\n    break\n"]),
        ("x = [i for i in a if i]\n", ["x = [i for i in a if True]\n"]),
        ("raise a or ValueError(f'{b + 1}')\n", []),
        ("if TYPE_CHECKING:\n    x = True\n", []),
        ("x = f(True)\nx = f(True)\n", ["x = f(False)\nx = f(True)\n", "x = f(True)\nx = f(False)\n"]),
    ],
)  # fmt: skip
def test_mutants_of_a_text(text: str, after: list[str]) -> None:
    found = [
        text.replace(mutant.before, mutant.after) for mutant in mutants("x.py", text) if text.count(mutant.before) == 1
    ]
    assert sorted(found) == sorted(after)
