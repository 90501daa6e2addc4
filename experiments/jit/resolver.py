"""What does pip do if an extension is pinned to one version of its host, and a newer one is installed?

Answer: see notes/jit_or_aot.md.

Two wheels of a host (1.0 and 2.0), one of an add-on that was compiled for 1.0 and says so, an environment of their own:
what somebody types, what pip's report says it installed, and whether a warning or an error was printed.
"""

from __future__ import annotations

import json
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

from experiments.lab import Page, Row, Rows, Run
from experiments.works.wheels import pip, put

CPU_ONLY = True
#: In this order, in one environment.
TYPED = ("install host", "install add-on", "install host==2.0", "install add-on host==2.0")


def measure(run: Run) -> Iterator[Row]:
    """A row per line that is typed: how it ended, what it installed, which host is there then."""
    with tempfile.TemporaryDirectory() as folder:
        index, here = Path(folder), Path(folder) / "environment"
        put(index, "host", "1.0")
        put(index, "host", "2.0")
        put(index, "add_on", "1.0", needs="host==1.0")
        venv.create(here, symlinks=True)
        report = index / "report.json"
        for typed in run.size(TYPED, TYPED[:2]):
            report.write_text('{"install": []}')
            more = ("--no-index", "--find-links", index, "--report", report)
            done = pip(*typed.split(), *more, python=here / "bin" / "python")
            installed = [item["metadata"] for item in json.loads(report.read_text())["install"]]
            (host,) = (path.name.split("-")[1].removesuffix(".dist") for path in here.rglob("host-*.dist-info"))
            yield {
                "typed": f"pip {typed}",
                "code": done.returncode,
                "installed": ", ".join(f"{item['name']} {item['version']}" for item in installed),
                "host": host,
                "warned": bool(done.stderr.strip()),
            }


def line_after_line(rows: Rows) -> str:
    """Which host each line leaves, and what pip says of it."""
    ends = {(0, False): "", (0, True): ", with a warning"}
    lines = (f"`{row['typed']}`: {row['host']}{ends.get((row['code'], row['warned']), ', refused')}" for row in rows)
    return f"The host that each line leaves, with an add-on compiled for host 1.0: {'; '.join(lines)}."


def report(page: Page, rows: Rows) -> None:
    """What follows."""
    page.say(line_after_line(rows))
