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

from experiments.lab import Row, Rows, Run, Table, Text, yes_or_no
from experiments.works.wheels import pip, put

#: In this order, in one environment.
TYPED = ("install host", "install add-on", "install host==2.0", "install add-on host==2.0")


def measure(run: Run) -> Iterator[Row]:
    """A row per line that is typed: how it ended, what it installed, which host was there before and is then."""
    with tempfile.TemporaryDirectory() as folder, run.attempt("pip"):
        index, here = Path(folder), Path(folder) / "environment"
        put(index, "host", "1.0")
        put(index, "host", "2.0")
        put(index, "add_on", "1.0", needs="host==1.0")
        venv.create(here, symlinks=True)
        report, before = index / "report.json", ""
        for typed in run.size(TYPED, TYPED[:2]):
            report.write_text('{"install": []}')
            more = ("--no-index", "--find-links", index, "--report", report)
            done = pip(*typed.split(), *more, python=here / "bin" / "python")
            items = [item["metadata"] for item in json.loads(report.read_text())["install"]]
            host = next((path.name.split("-")[1].removesuffix(".dist") for path in here.rglob("host-*.dist-info")), "")
            lines = (done.stderr or done.stdout).strip().splitlines()
            yield {
                "typed": f"pip {typed}",
                "code": done.returncode,
                "installed": ", ".join(f"{item['name']} {item['version']}" for item in items),
                "before": before,
                "host": host,
                "warned": bool(done.stderr.strip()),
                "says": lines[-1] if lines else "",
            }
            before = host


def quietly(rows: Rows) -> str | None:
    """What became of the newer host."""
    row = next((row for row in rows if row["before"] > row["host"] > ""), None)
    if row is None:
        return None
    loud = "with" if row["warned"] else "without"
    return f"`{row['typed']}` put host {row['host']} in the place of {row['before']} {loud} a warning."


TABLES = [
    Table("one environment, line after line", {
        "typed": "typed", "exit status": "code", "pip's report": "installed", "host then": "host",
        "a warning": yes_or_no("warned"), "pip's last line": "says",
    })
]  # fmt: skip
TEXTS = [Text("resolver", quietly)]
