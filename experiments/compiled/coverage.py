"""Which of torch's optimizers does torch.compile compile, and what keeps it from the others?

Answer: see notes/compiled_optimizer.md.

Each class of ``torch.optim``, with foreach where it has that, takes three steps over two tensors in a compiled
function.  It counts as *compiled* where all of its arithmetic went into one graph; as *in parts* where it went into
several; as *not compiled* where there is no graph.  What makes a graph is Dynamo's to say: the tensors are on the CPU
whatever the device is, the back end is ``aot_eager``, and nothing is compiled for it.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from experiments.lab import Page, Row, Rows, Run
from experiments.works.apart import rows_of
from experiments.works.models import Work

TOYS = ("SGD", "SparseAdam")
LIMIT = 150
WHOLE, IN_PARTS, NOT = "compiled", "in parts", "not compiled"
#: The break that ``Optimizer.step`` has on purpose, so that the caller's frame is not in the graph (pytorch#104053).
DELIBERATE = "torch._dynamo.graph_break()"
#: Where Inductor says which GPUs are too old, and how.
CAPABILITY = (Path("_inductor", "scheduler.py"), r"get_device_properties\(device\)\)\.major < (\d+)")


def names() -> list[str]:
    """Of the classes."""
    known = [found for found in vars(torch.optim).values() if inspect.isclass(found)]
    return sorted(cls.__name__ for cls in known if torch.optim.Optimizer in cls.__mro__[1:])


def measure(run: Run) -> Iterator[Row]:
    """A row per class: graphs, breaks, why; and one of the GPUs that are taken."""
    for row in rows_of(run, covered, run.size(names(), TOYS), limit=LIMIT):
        yield {**row, "toy": run.quick}
    yield capability(run.device)


def capability(device: torch.device) -> Row:
    """The least compute capability, as the text of the installed torch has it, and what is here."""
    path, pattern = CAPABILITY
    found = re.search(pattern, (Path(torch.__file__).parent / path).read_text())
    here = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
    return {"what": "capability", "least": int(found[1]) if found else None, "here": here, "cuda": torch.version.cuda}


def stepping(name: str, params: list[torch.nn.Parameter]) -> Callable[[], object]:
    """A step of an optimizer, in foreach if it has that; of L-BFGS with a closure, of SparseAdam on such gradients."""
    cls = getattr(torch.optim, name)
    known = {"foreach": True} if "foreach" in inspect.signature(cls).parameters else {}
    if name == "SparseAdam":
        for p in params:
            p.grad = p.grad.to_sparse() if p.grad is not None else None
    optimizer = cls(params, lr=1e-3, **known)
    if name == "LBFGS":
        return lambda: optimizer.step(lambda: sum(p.detach().square().sum() for p in params))
    step: Callable[[], object] = optimizer.step
    return step


def covered(asked: Sequence[str]) -> Iterator[Row]:
    """The rows, of a process of its own."""
    from torch._dynamo.utils import counters

    for name in asked:
        torch._dynamo.reset()
        counters.clear()
        one, other = (Work("covered", [(4, 4)] * 2).parameters(torch.device("cpu")) for _ in range(2))
        row: Row = {"what": "class", "name": name, "error": None, "ended": None}
        try:
            plain, bound = stepping(name, one), stepping(name, other)
            step = torch.compile(partial(call, bound), backend="aot_eager")
            for _ in range(3):
                plain()
                step()
            row["error"] = max(float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True))
        except Exception as error:  # a compiler's may be anything
            row["ended"] = f"{type(error).__name__}: {str(error)[:300]}"
        breaks = Counter({why(text): count for text, count in counters["graph_break"].items()})
        breaks.pop(DELIBERATE, 0)
        yield {
            **row,
            "graphs": int(counters["stats"]["unique_graphs"]),
            "breaks": sum(breaks.values()),
            "why": "; ".join(breaks),
        }


def call(step: Callable[[], object]) -> None:
    """What is compiled: a user's function that steps."""
    step()


def why(text: str) -> str:
    """What broke a graph, in torch's words: the call where that says more than the first line."""
    first, _, context = text.partition("\n")
    if DELIBERATE in first:
        return DELIBERATE
    said = re.search(r"Developer debug context:\s*(.+?)(?: at 0x\w+)?(?=>?\n|>?$)", context)
    return f"{first.strip()} ({said[1].strip()[:80]})" if said else first.strip()


def derive(rows: Rows) -> Rows:
    """What became of each."""
    found = Rows()
    for row in rows:
        if row["what"] == "class":
            graphs = row["graphs"] if row["ended"] is None else 0
            row = {**row, "became": WHOLE if graphs == 1 and not row["breaks"] else IN_PARTS if graphs else NOT}
        found.append(row)
    return found


def unclassified(rows: Rows) -> float:
    """Classes of torch.optim of which nothing was found out."""
    return len(set(names()) - set(rows.values("name")))


def report(page: Page, rows: Rows) -> None:
    """Tables and what is held to a limit."""
    classes = rows.where(what="class")
    whole = classes.where(became=WHOLE)
    page.table("classes of torch.optim that are not compiled as a whole", Rows(x for x in classes if x not in whole),
        {"class": "name", "became": "became", "why": lambda row: row["ended"] or row["why"]})  # fmt: skip
    page.say(f"Of {len(classes)} classes of torch.optim {len(whole)} are compiled as a whole.")
    page.bar("classes of torch.optim that are not classified", rows.where(toy=False), unclassified, "≤ 0")
    page.bar("compiled: parameters off from eager (lr is 0.001)", rows, "error", "≤ 0.0001")
