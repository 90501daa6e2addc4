"""Plant faults in the project, one at a time, and see that the test named beside each finds it.

    python scripts/plant_faults.py                       # all that are listed
    python scripts/plant_faults.py 3 7                   # these
    python scripts/plant_faults.py --random 40 clipping  # random mutants of an area, for the tests of that area
    python scripts/plant_faults.py --random 40 clipping --suite tests/optim --suite "tests/contract -k clip"

A refactoring of the tests must leave every one of them found.  tests/planted_faults.toml lists them: the file, a piece
of its text, what takes its place, and the test.  It also lists areas: some files, and their tests.  Tests run in a copy
of the project, once without any fault; with a fault they have to fail.  Only tests that ``make test`` runs count.

Each run is a fork of this process, which has loaded torch.  Faults are written to the copy's files, so processes that
tests start have them, too, and so have kernels in CUDA and C++.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import types
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from mutants import Fault, draw

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "planted_faults.toml"
#: What tests load, none of it ours.
LOADED = ("pytest", "hypothesis", "numba.typed", "torch._dynamo", "torch.distributed.checkpoint.state_dict")
#: Exit statuses of pytest: all tests passed, some failed; beyond, it did not come to run them, and below, it crashed.
PASSED, FAILED = 0, 1
#: Seconds until a run counts as one that hangs, and is killed.
PATIENCE = 1200


class Outcome(NamedTuple):
    """What came of a run of pytest: exit status (below 0: a signal's), the first test that failed, and seconds."""

    status: int
    failed: str
    seconds: float


class Copy:
    """A copy of the project, where tests run: what git tracks, as it is in the working tree.

    Args:
        root: the project.
        folder: an empty one, for the copy and all that tests write.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self.tree, self._cache = folder, folder / "tree", folder / "cache"
        listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
        for name in filter(lambda name: (root / name).is_file(), listed.splitlines()):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, self.tree / name)
        self._cache.mkdir()
        if (compiled := root / ".pytest_cache").is_dir():
            shutil.copytree(compiled, self._cache, dirs_exist_ok=True)
        self.without_faults = functools.cache(functools.partial(self._run, cache=self._cache))

    def with_fault(self, fault: Fault, tests: str) -> Outcome:
        """Run tests with a fault; the copy is whole again afterwards.

        Raises:
            RuntimeError: the text to replace does not stand in the file once; or the tests fail without the fault, or
                are not there.
        """
        path = self.tree / fault.file
        text, written = path.read_text(), path.stat()
        if text.count(fault.before) != 1:
            raise RuntimeError(f"{fault.file}: {fault.before!r} stands there {text.count(fault.before)} times")
        if (status := self.without_faults(tests).status) != PASSED:
            raise RuntimeError(f"{tests}: pytest ends with {status} without the fault, not with {PASSED}")
        try:
            path.write_text(text.replace(fault.before, fault.after))
            os.utime(path, (0, 0))  # of no bytecode that is there, even if both were written in one second
            with tempfile.TemporaryDirectory(dir=self.folder) as cache:  # what is compiled with the fault is forgotten
                shutil.copytree(self._cache, cache, copy_function=os.link, dirs_exist_ok=True)
                return self._run(tests, cache=Path(cache), PYTHONDONTWRITEBYTECODE="1")
        finally:
            path.write_text(text)
            os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))  # as its bytecode says

    def _run(self, tests: str, cache: Path, **variables: str) -> Outcome:
        marks = ["-m", "not long and not clients"]
        arguments = ["-q", "-x", "-rfE", "-o", f"cache_dir={cache}", *marks, *shlex.split(tests)]
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as temporary:
            said = Path(temporary, "said")
            given = (arguments, self.tree, said, {"TMPDIR": temporary, **variables})
            run = multiprocessing.get_context("fork").Process(target=_be_pytest, args=given)
            run.start()
            try:
                while run.exitcode is None and time.perf_counter() < begin + PATIENCE:
                    time.sleep(0.05)  # join() would wait for processes that a test has left, too
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid or 0, signal.SIGKILL)  # itself, if it hangs, and whatever it has started
                run.join()
            failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said.read_text(errors="replace"), re.M)
        return Outcome(run.exitcode or PASSED, failed[1] if failed else "", time.perf_counter() - begin)


def _be_pytest(arguments: list[str], tree: Path, said: Path, variables: dict[str, str]) -> None:
    """Be ``python -m pytest`` in a tree, in a fork; what it says goes to a file."""
    import pytest

    os.setpgrp()
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w")
    os.chdir(tree)
    os.environ.update(variables)
    tempfile.tempdir = None  # it is that of the environment
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in variables
    sys.modules["__main__"] = types.ModuleType("__main__")  # processes that tests start do not load this script
    sys.path[0] = str(tree)
    sys.exit(int(pytest.main(arguments)))


def plant(copy: Copy, faults: dict[int, Fault]) -> int:
    """Plant each fault for its own test, and print what comes of it.  Returns how many were not found."""
    missed = 0
    for number, fault in faults.items():
        try:
            outcome = copy.with_fault(fault, fault.test)
            word = told(outcome) if outcome.status <= FAILED else f"pytest ends with {outcome.status}"
            found = outcome.status <= FAILED and outcome.status != PASSED
        except RuntimeError as error:
            word, found = str(error), False
        missed += not found
        print(f"{number:3} {word}  {fault.file}: {fault.what}  [{fault.test}]", flush=True)
    return missed


def compare(copy: Copy, records: list[dict[str, Any]], suites: list[str], file: Path | None) -> None:
    """Plant mutants for each suite, and print which are found by which.

    Args:
        copy: where.
        records: fields of mutants, and ``found``: of suites that have run, the first test that failed, or None.
        suites: arguments of pytest; those that have run do not run again.
        file: where the records go behind each mutant.
    """
    for number, record in enumerate(records, 1):
        mutant = Fault(*(record[name] for name in ("what", "file", "before", "after")))
        print(f"{number:3} {mutant.file} {mutant.what}")
        for suite in suites:
            if suite not in record["found"]:
                outcome = copy.with_fault(mutant, suite)
                why = outcome.failed or f"pytest ends with {outcome.status}"
                record["found"][suite] = None if outcome.status == PASSED else why
                print(f"    {told(outcome)}  {outcome.failed}  [{shorten(suite, 70)}]", flush=True)
        if file is not None:
            file.write_text(json.dumps(records, indent=1))
    sets: dict[tuple[str, ...], list[int]] = {}
    for number, record in enumerate(records, 1):
        by = tuple(suite for suite, test in record["found"].items() if test is not None)
        sets.setdefault(by, []).append(number)
    for by, numbers in sets.items():
        print(f"{len(numbers)} found by {' and by '.join(shorten(suite, 70) for suite in by) or 'nothing'}: {numbers}")


def told(outcome: Outcome) -> str:
    return f"{'MISSED' if outcome.status == PASSED else 'found '} {outcome.seconds:4.0f} s"


def main() -> int:
    """Returns how many of the listed faults were not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="which of the list, from 1 on (default: all)")
    parser.add_argument("--random", nargs=2, metavar=("N", "AREA"), help="mutants in place of the list")
    parser.add_argument("--seed", type=int, default=0, help="other mutants (default: %(default)s)")
    parser.add_argument("--suite", action="append", metavar="TESTS", help="arguments of pytest (default: the area's)")
    parser.add_argument("--to", type=Path, metavar="FILE", help="where mutants go, and what finds them (JSON)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="the mutants of such a file, for suites it lacks")
    options = parser.parse_args()
    listed = tomllib.loads(LIST.read_text())
    if options.random and options.random[1] not in listed["area"]:
        parser.error(f"no area is called {options.random[1]}; {LIST.name} lists {', '.join(listed['area'])}")
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="pagedopt-faults-") as folder:
        copy = Copy(ROOT, Path(folder))
        if options.again:
            compare(copy, json.loads(options.again.read_text()), options.suite or [], options.to or options.again)
        elif options.random:
            count, name = options.random
            area = listed["area"][name]
            drawn = draw(ROOT, area["files"], int(count), options.seed)
            records = [{**mutant._asdict(), "found": {}} for mutant in drawn]
            compare(copy, records, options.suite or [" ".join(area["tests"].split())], options.to)
        else:
            faults = {n: Fault(**fault) for n, fault in enumerate(listed["fault"], 1)}
            return plant(copy, {n: faults[n] for n in options.numbers or faults})
    return 0


if __name__ == "__main__":
    sys.exit(main())
