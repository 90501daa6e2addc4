"""What code does the compiler write for a step, how does one get at it, and where does a mistake's message point?

Answer: see notes/compiled_optimizer.md.

A step over two tensors of 64 x 64 is compiled by Inductor, and its code is read: kernels, loads, stores, intermediates
(tmp0, tmp1 …).  The graph is taken after Inductor's fusion.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._logging import set_logs

from experiments.lab import Page, Row, Rows, Run
from experiments.pictures import COLORS, GRAY
from experiments.works.apart import rows_of
from experiments.works.builds import ADAMW, SGD, compiled
from experiments.works.models import Build, Work
from experiments.works.slices import combo
from pagedopt.kernels.nvrtc import compile_cuda
from pagedopt.rules import rule

# --- a mistake in a rule, and in a string of CUDA: where does the message point?


def wrong_rule(param: Any, grad: Any, *, lr: Any) -> Any:
    """A rule that asks in a loop whether a hyperparameter is true."""
    while lr:
        lr = lr - 1
    return param - lr * grad


WRONG_STRING = """
extern "C" __global__ void wrong(float* param) {
    param[0] = gradient;
}
"""
#: What raises, and the line of its mistake: the third, in this file or in the string.
MISTAKES: dict[str, tuple[Callable[[], object], int]] = {
    "a rule (ours)": (lambda: rule(wrong_rule).cuda_source(), wrong_rule.__code__.co_firstlineno + 2),
    "a string of CUDA": (lambda: compile_cuda(WRONG_STRING, ("wrong",), "sm_90"), 3),
}


def message(of: str) -> Row:
    """What a mistake's message says of where it is, and whether it names this file and the line.

    Raises:
        ImportError: the compiler is not here.
    """
    mistake, line = MISTAKES[of]
    try:
        mistake()
    except ImportError:
        raise
    except Exception as error:  # what each raises is the question
        kind, said = type(error).__name__, str(error).replace(f"{Path(__file__).parent}/", "")
    at = next((text.strip() for text in said.splitlines() if re.search(rf"\b{line}\b", text)), "")
    named = re.search(rf"{re.escape(Path(__file__).name)}\D+{line}\b", said)
    return {"what": "mistake", "case": of, "error": kind, "at": at[:160], "named": bool(named)}


# --- the question

MEASURES = ("kernels",)
LIMIT = 150
ADAMW_LIST, SGD_LIST = "AdamW, foreach", "SGD, foreach"
CASES: dict[str, Build] = {
    SGD_LIST: compiled(SGD),
    ADAMW_LIST: compiled(ADAMW),
    "AdamW, loop": compiled(ADAMW, foreach=False),
}
ON_GPU = {"AdamW, loop with combo_kernels": compiled(ADAMW, foreach=False, options=combo())}
#: What is counted in the code, Triton's and C++.
PATTERNS = {
    "kernels": r"async_compile\.(?:triton|cpp_pybinding)\(",
    "loads": r"tl\.load\(|loadu\(|= (?:in|out|in_out)_ptr\d+\[",
    "stores": r"tl\.store\(|\.store\(|^\s*(?:in_)?out_ptr\d+\[.*\] = ",
    "intermediates": r"^\s*(?:auto )?tmp\d+ = ",
}
#: Settings that the lecture names, and what does it today.
SETTINGS: dict[str, Callable[[], None]] = {
    "TORCH_LOGS=inductor": partial(set_logs, inductor=logging.INFO),
    "TORCH_LOGS=output_code": partial(set_logs, output_code=True),
}


def measure(run: Run) -> Iterator[Row]:
    """Rows of code, of ways to it, of the graph, of mistakes."""
    if run.quick:
        run.left_out.append("code of Inductor: takes its compiler and tens of seconds")
    else:
        yield from rows_of(run, written, str(run.device), limit=LIMIT)
    for of in MISTAKES:
        with run.attempt(f"a mistake in {of}", (ImportError,)):
            yield message(of)
    if run.device.type == "cpu":
        run.left_out.append("combo kernels: need a GPU")


def written(device: str) -> Iterator[Row]:
    """The rows of what Inductor writes, of a process of its own; what fails is a row, too."""
    where = torch.device(device)
    cases = {**CASES, **(ON_GPU if where.type == "cuda" else {})}
    tasks: dict[str, Callable[[], Iterator[Row]]] = {
        case: partial(read, case, build, where) for case, build in cases.items()
    }
    tasks |= {setting: partial(said_by, logs, where) for setting, logs in SETTINGS.items()}
    for case, task in tasks.items():
        try:
            for row in task():
                yield {"case": case, "device": where.type, **row}
        except Exception as error:  # a compiler's may be anything
            yield {"what": "failed", "case": case, "ended": f"{type(error).__name__}: {error}"[:400]}


def small(build: Build, device: torch.device) -> Callable[[], object]:
    """A step over two tensors, forgotten by the compiler."""
    torch._dynamo.reset()
    return build(Work("written", [(64, 64)] * 2).parameters(device)).step


def read(case: str, build: Build, device: torch.device) -> Iterator[Row]:
    """Inductor's code of a case, counted; of SGD its first kernel, of AdamW its graph."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    kernels: dict[Any, set[int]] = {}

    def look(scheduled: list[Any]) -> list[Any]:
        for i, kernel in enumerate(scheduled):
            for part in kernel.get_nodes():
                for origin in getattr(part.node, "origins", ()):
                    kernels.setdefault(origin, set()).add(i)
        return scheduled

    settings = {"_post_fusion_custom_pass": look} if case == ADAMW_LIST else {}
    with config.patch({"force_disable_caches": True, **settings}):
        code = "\n".join(run_and_get_code(small(build, device))[1])
    yield {"what": "code"} | {name: len(re.findall(it, code, re.MULTILINE)) for name, it in PATTERNS.items()}
    if kernels:
        yield {"what": "graph", "nodes": nodes(kernels)}


def nodes(kernels: dict[Any, set[int]]) -> list[Any]:
    """Name, operator, kernels that compute it, and inputs of each node of the graph that kernels were made of."""
    graph = next(iter(kernels)).graph.nodes
    through = {node: node.args[0] for node in graph if "getitem" in str(node.target)}
    return [
        [node.name, node.op, sorted(kernels.get(node, ())), [through.get(x, x).name for x in node.all_input_nodes]]
        for node in graph
        if node.op != "output" and node not in through
    ]


def said_by(logs: Callable[[], None], device: torch.device) -> Iterator[Row]:
    """What a setting of TORCH_LOGS prints: lines, paths of code, code."""
    from torch._inductor import config

    step = small(CASES[SGD_LIST], device)
    with contextlib.redirect_stderr(heard := io.StringIO()):  # where the handler that is made now writes to
        logs()
        with config.patch({"force_disable_caches": True}):
            step()
        set_logs()
    said = heard.getvalue()
    paths = len(re.findall(r"Output code written to: \S+\.py", said))
    yield {"what": "way", "lines": said.count("\n"), "paths": paths, "code": "async_compile" in said}


def derive(rows: Rows) -> Rows:
    """Nodes and kernels of the graph, counted."""
    found = Rows()
    for row in rows:
        if row["what"] == "graph":
            kernels = {kernel for _, _, those, _ in row["nodes"] for kernel in those}
            row = {**row, "count": len(row["nodes"]), "kernels": len(kernels)}
        found.append(row)
    return found


def placed(drawn: Sequence[Any]) -> dict[str, tuple[float, int]]:
    """Where nodes stand: each below what goes into it (inputs come first), levels centred."""
    levels: dict[str, int] = {}
    for name, _, _, inputs in drawn:
        levels[name] = 1 + max((levels[source] for source in inputs), default=-1)
    lines = [[name for name in levels if levels[name] == level] for level in range(max(levels.values()) + 1)]
    return {name: (i - (len(line) - 1) / 2, levels[name]) for line in lines for i, name in enumerate(line)}


def coloured(figure: Any, rows: Rows) -> None:
    """A graph from top to bottom, each node in the colours of the kernels that compute it."""
    figure.set_size_inches(8, 7.5)
    axes, at, used = figure.add_subplot(), placed(rows[0]["nodes"]), set[int]()
    for name, op, kernels, inputs in rows[0]["nodes"]:
        x, y = at[name]
        for source in inputs:
            axes.plot(*zip(at[source], (x, y), strict=True), color="#BBBBBB", linewidth=0.6, zorder=1)
        for i, kernel in enumerate(kernels or [-1]):  # side by side
            color = GRAY if kernel < 0 else COLORS[kernel % len(COLORS)]
            axes.scatter([x + 0.1 * i], [y], color=color, marker="s" if op == "placeholder" else "o", s=36, zorder=2)
        if op != "placeholder":
            short = name.removeprefix("_foreach_").replace("full_default", "full")
            axes.annotate(short, (x, y), (2, -13), textcoords="offset points", ha="center", fontsize=7)
        used |= set(kernels)
    axes.invert_yaxis()
    axes.set_axis_off()
    for i, kernel in enumerate(sorted(used)):
        color = COLORS[kernel % len(COLORS)]
        axes.text(1, 0.03 * (len(used) - i), f"by kernel {kernel}", transform=axes.transAxes, ha="right", color=color)
    axes.text(1, 0, "squares: inputs", transform=axes.transAxes, ha="right", color=GRAY)
    axes.set_title(
        "{case}, over two tensors on {device}, compiled to {kernels} kernels\n"
        "dots: operations, in the colours of the kernels that compute them".format_map(rows[0])
    )


def report(page: Page, rows: Rows) -> None:
    """Tables, what follows, and a picture."""
    page.table("Inductor's code for a step over two tensors on {device}", rows.where(what="code"),
        {"step": "case", "kernels": "kernels", "loads": "loads", "stores": "stores",
        "tmp": "intermediates"})  # fmt: skip
    page.picture("graph", rows.where(what="graph"), coloured)
