"""``notes/clients.md``: what of which client works, made of what its tests have shown.  To run them and write it anew:

    PAGEDOPT_CLIENTS_RECORD=notes/raw/clients.json make test-clients TEST_ARGS='-m "" tests/clients'
    PYTHONPATH=.:tests/helpers python -m tests.clients.clients_page

A line is the docstring of a test.  Runs with and without a GPU are kept side by side, each in its part of the record.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import platform
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

PAGE = ROOT / "notes" / "clients.md"
RAW = ROOT / "notes" / "raw" / "clients.json"
FSDP2 = ROOT / "experiments" / "results" / "fsdp2-nvidia-h100-80gb-hbm3.json"


@dataclass(frozen=True)
class Client:
    """A client, as the page has it.

    Attributes:
        name: for the heading.
        file: of its tests.
        packages: whose versions the page names.
        write: what a user writes.
        example: a program in ``examples/``.
        words: what else a user has to know.
    """

    name: str
    file: str
    packages: tuple[str, ...]
    write: str
    example: str = ""
    words: str = ""


CLIENTS = (
    Client(
        "torch itself",
        "tests/clients/test_torch.py",
        ("torch",),
        'optimizer = PagedAdamW(model.parameters(), lr=3e-4, device_budget="2GiB")',
        "loop.py",
    ),
    Client(
        "Hugging Face Trainer",
        "tests/clients/test_trainer.py",
        ("transformers",),
        'kwargs = {"lr": arguments.learning_rate, "device_budget": "2GiB"}\n'
        "Trainer(model, arguments, optimizer_cls_and_kwargs=(PagedAdamW, kwargs), …)\n\n"
        "optimizer = PagedAdamW(model.parameters(), **kwargs)\n"
        "Trainer(model, arguments, optimizers=(optimizer, None), …)",
        "hf_trainer.py",
        "Trainer does not pass its learning rate to such a class, so the arguments contain it. It makes two groups: "
        "one with its `weight_decay`, one (biases and norms) without. `trainer.optimizer.optimizer` is ours. With "
        "`optimizers=`, write `with optimizer.guard(): trainer.train()`.",
    ),
    Client(
        "accelerate",
        "tests/clients/test_accelerate.py",
        ("accelerate",),
        "model, optimizer, batches = accelerator.prepare(model, PagedAdamW(model.parameters(), lr=3e-4), batches)\n"
        "optimizer.optimizer.memory_report()  # our own methods are those of the inner optimizer",
        "accelerate_loop.py",
    ),
    Client(
        "Lightning and Fabric",
        "tests/clients/test_lightning.py",
        ("lightning",),
        "def configure_optimizers(self):\n"
        "    return PagedAdamW(self.parameters(), lr=3e-4)\n\n\n"
        "model, optimizer = fabric.setup(model, PagedAdamW(model.parameters(), lr=3e-4))",
        "lightning_fit.py",
    ),
    Client(
        "PEFT",
        "tests/clients/test_peft.py",
        ("peft", "transformers"),
        "import peft.optimizers\n\n"
        "PagedAdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)\n"
        "peft.optimizers.create_loraplus_optimizer(model, PagedAdamW, lr=3e-4, loraplus_lr_ratio=16)",
    ),
    Client(
        "timm",
        "tests/clients/test_timm.py",
        ("timm",),
        "import timm.optim\n\n"
        "PagedAdamW(timm.optim.param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.75), lr=3e-4)",
    ),
    Client(
        "Several processes of one machine: DDP, ZeRO, FSDP, tensor parallel",
        "tests/clients/test_several_processes.py",
        ("torch",),
        "fully_shard(model)  # state is sharded as its parameters\n"
        'optimizer = PagedAdamW(model.parameters(), lr=3e-4, device_budget="50%")  # of each process',
        "fsdp2.py",
    ),
)

_HEAD = """\
# Trainers and libraries that these optimizers were run with

Made by `tests/clients/clients_page.py` of `raw/clients.json`; do not edit. Each line is a test in `tests/clients`. It
trains a small model with `PagedAdamW` and with torch's fused AdamW from the same seed, and compares every step, the
losses and the weights. `make test-clients` runs most of them, `make test-long` all.

Where a line says nothing else, it passed on a CPU and on CUDA, with all state on the model's device and with
`device_budget=0`. *Resumed* is in a new process, and has the same bits as without interruption.

Several processes run over gloo on CPUs and over NCCL on GPUs; several machines have not been tried. If transformers,
timm or Lightning cannot be imported beside a CPU build of torch, see [setup.md](setup.md).

{runs}
"""


def page() -> str:
    record = json.loads(RAW.read_text())
    runs = []
    for name, run in record.items():
        versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
        runs.append(f"* {name.upper()}: {run['machine']}, Python {run['python']}, {versions}")
    chapters = [_chapter(client, record) for client in CLIENTS]
    return "\n".join([_HEAD.format(runs="\n".join(runs)), *chapters, _iterations()])


def _iterations() -> str:
    """What ``python -m experiments fsdp2`` has measured."""
    from experiments.lab import Rows
    from experiments.step import fsdp2
    from experiments.step.fsdp2 import AWAY, LINK, OURS

    measured = json.loads(FSDP2.read_text())
    part = measured["parts"]["fsdp2"]
    rows = fsdp2.derive(Rows(part["rows"]))
    whole, step = (rows.first(case=OURS, what=what)["ratio"] for what in ("iterations", "steps"))
    away = rows.first(case=AWAY, what="steps")
    taken, rate = away["ours"]["median"], rows.first(kind=LINK)
    words = (
        f"Over two {measured['machine']['gpu']}, all state on the devices, an iteration of FSDP2 takes "
        f"{whole['median']:.2f} times as long as with torch's fused AdamW, and its step {step['median']:.2f} times "
        f"(medians of {whole['n']} turns; p10 to p90 of iterations: {whole['p10']:.2f} to {whole['p90']:.2f}). "
        f"With all {away['away'] / 1e9:.2f} GB of each process on the host a step takes {taken / 1e3:.0f} ms: "
        f"{taken / away['floor']:.2f} times what copies of the same bytes take while the other process copies, too "
        f"({rate['bytes'] / rate['time']['median'] / 1e3:.1f} GB/s each way and card). Measured at {part['commit']} by "
        f"`python -m experiments fsdp2`; [raw](../experiments/results/{FSDP2.name})."
    )
    return f"{textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False)}\n"


def _chapter(client: Client, record: dict[str, Any]) -> str:
    lines = [f"## {client.name}", "", "```python", client.write, "```", ""]
    if client.example:
        lines += [f"A whole program: [examples/{client.example}](../examples/{client.example}).", ""]
    if client.words:
        lines += [*textwrap.wrap(client.words, 120), ""]
    for name, words in described(ROOT / client.file):
        line = f"* {words}{_where(record, f'{client.file}::{name}')}"
        lines.append(textwrap.fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join([*lines, ""])


def described(file: Path) -> Iterator[tuple[str, str]]:
    """Name and docstring of each test in a file, which is not imported: its client may be missing."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, " ".join((ast.get_docstring(node) or "").split())


def _where(record: dict[str, Any], test: str) -> str:
    """The only device on which a test has passed, if it has not on both; and the cases that failed."""
    passed, failed = [], list[str]()
    for device, run in record.items():
        found = {node: outcome for node, outcome in run["outcomes"].items() if node.partition("[")[0] == test}
        passed += [device.upper()] if found else []
        failed += [f"{device} {node.removeprefix(test)}" for node, outcome in found.items() if outcome != "passed"]
    if failed:
        return f" *Fails: {', '.join(failed)}.*"
    return {0: " *Not run yet.*", 1: f" *{' and '.join(passed)} alone.*"}.get(len(passed), "")


def _arguments(node: str) -> list[str]:
    return re.split(r"[-\[\]]", node.partition("::")[2])


@dataclass
class Record:
    """A plugin that keeps what the tests of clients have shown.

    Attributes:
        path: the file.  Parts for devices that were not there stay, and in others what was not run this time, if it was
            run on such a machine with the same versions.
    """

    path: Path
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid.partition("::")[0] not in {client.file for client in CLIENTS}:
            return
        if report.skipped or (report.when != "call" and not report.failed):
            return
        device = "cuda" if "cuda" in _arguments(report.nodeid) else "cpu"
        of = self.outcomes.setdefault(device, {})
        if of.get(report.nodeid) != "failed":
            of[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        import torch

        record = json.loads(self.path.read_text()) if self.path.exists() else {}
        packages = dict.fromkeys(name for client in CLIENTS for name in client.packages)
        there = [name for name in packages if importlib.util.find_spec(name)]
        for device, outcomes in self.outcomes.items():
            run = {
                "machine": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
                "python": platform.python_version(),
                "versions": {name: importlib.metadata.version(name) for name in there},
            }
            before = record.get(device, {})
            earlier = before["outcomes"] if run == {name: before.get(name) for name in run} else {}
            record[device] = {**run, "outcomes": dict(sorted((earlier | outcomes).items()))}
        self.path.write_text(json.dumps({name: record[name] for name in sorted(record)}, indent=1) + "\n")


if __name__ == "__main__":
    PAGE.write_text(page())
