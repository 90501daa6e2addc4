"""What code does the compiler write for a step, how does one get at it, and where does a mistake's message point?

Answer: see notes/compiled_optimizer.md.

A step over two tensors of 64 x 64 is compiled by Inductor, and its code is read: kernels, their calls, loads, stores,
intermediates (tmp0, tmp1 …), registers and spills as Triton says them.  The graph is taken after Inductor's fusion.
The kernel of SGD is kept as it was written, beside the functor that ours makes of its rule.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.compiled.mistakes import mistakes
from experiments.compiled.pictures import coloured
from experiments.lab import Plot, Row, Rows, Run, Table, Text, yes_or_no
from experiments.works import contenders
from experiments.works.contenders import ADAMW, SGD
from experiments.works.fresh import rows_of
from experiments.works.models import Work
from experiments.works.slices import combo
from pagedopt.rules.sgd import sgd

LIMIT, LETTERS = 150, 4000
ADAMW_LIST, SGD_LIST = "AdamW, foreach", "SGD, foreach"
CASES: dict[str, contenders.Build] = {
    SGD_LIST: contenders.compiled(SGD),
    ADAMW_LIST: contenders.compiled(ADAMW),
    "AdamW, loop": contenders.compiled(ADAMW, foreach=False),
    "AdamW, loop with combo_kernels": contenders.compiled(ADAMW, foreach=False, options=combo()),
}
#: What is counted in the code, Triton's and C++.
PATTERNS = {
    "kernels": r"async_compile\.(?:triton|cpp_pybinding)\(",
    "calls": r"^ +\w+_fused\w*(?:\.run)?\(",
    "loads": r"tl\.load\(|loadu\(|= (?:in|out|in_out)_ptr\d+\[",
    "stores": r"tl\.store\(|\.store\(|^\s*(?:in_)?out_ptr\d+\[.*\] = ",
    "intermediates": r"^\s*(?:auto )?tmp\d+ = ",
    "copies": r"copy_\(",
}
#: What Triton says of a kernel that is loaded.
TRITON = {"registers": "n_regs", "spills": "n_spills"}
#: Settings that the lecture names, and what does it today.
SETTINGS = ("inductor", "output_code")


def measure(run: Run) -> Iterator[Row]:
    """Rows of code, of ways to it, of the graph, of ours, of mistakes."""
    if run.quick:
        run.left_out.append("code of Inductor: takes its compiler and tens of seconds")
    found = () if run.quick else rows_of(run, written, str(run.device), limit=LIMIT)
    for row in itertools.chain(found, mistakes()):
        if row["what"] == "failed":
            run.leave_out(f"{row['case']}: {row['ended']}")
        else:
            yield row
    yield {"what": "text", "case": "SGD as a rule (ours)", "language": "cpp", "text": sgd.cuda_source()}
    run.left_out.append("the slide's own kernel beside today's: its text is in no source that was read")
    run.left_out.append("a mistake in a Triton kernel: not tried")
    if run.device.type == "cpu":
        run.left_out.append("combo kernels, registers and spills: need a GPU")


def written(device: str) -> Iterator[Row]:
    """The rows of what Inductor writes, of a process of its own; what fails is a row, too."""
    where = torch.device(device)
    cases = [case for case in CASES if where.type == "cuda" or "combo" not in case]
    tasks: list[tuple[str, str, Callable[[], Row]]] = [("code", case, partial(code, case, where)) for case in cases]
    tasks += [("text", SGD_LIST, partial(text, where))]
    tasks += [("way", f"TORCH_LOGS={setting}", partial(said_by, setting, where)) for setting in SETTINGS]
    tasks += [("way", "TORCH_COMPILE_DEBUG=1", partial(files, where)), ("graph", ADAMW_LIST, partial(graph, where))]
    for what, case, task in tasks:
        try:
            yield {"what": what, "case": case, "device": where.type, **task()}
        except Exception as error:  # a compiler's may be anything
            yield {"what": "failed", "case": f"{what} of {case}", "ended": f"{type(error).__name__}: {error}"[:400]}


def codes(case: str, device: torch.device) -> str:
    """What Inductor writes for a case."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    step = CASES[case](Work("written", [(64, 64)] * 2).parameters(device)).step
    with config.patch({"force_disable_caches": True}):
        return "\n".join(run_and_get_code(step)[1])


def code(case: str, device: torch.device) -> Row:
    """It, counted."""
    found = codes(case, device)
    return {name: len(re.findall(pattern, found, re.MULTILINE)) for name, pattern in PATTERNS.items()} | hardware()


def text(device: torch.device) -> Row:
    """The first kernel's function in the code of SGD."""
    found = re.search(r"^(?:def triton_|extern \"C\").*?(?=^''')", codes(SGD_LIST, device), re.MULTILINE | re.DOTALL)
    assert found is not None, "there is no kernel in it"
    return {"language": "python" if device.type == "cuda" else "cpp", "text": found[0].rstrip()[:LETTERS]}


def hardware() -> Row:
    """The most registers and spills of the Triton kernels that were loaded since it was asked last."""
    from torch._inductor.codecache import PyCodeCache

    modules: list[Any] = getattr(PyCodeCache, "modules", [])
    loaded = [launcher for module in modules for kernel in vars(module).values()
              for launcher in getattr(kernel, "launchers", ())]  # fmt: skip
    modules.clear()
    found = {name: [getattr(x, attribute, None) for x in loaded] for name, attribute in TRITON.items()}
    return {name: max((n for n in numbers if n is not None), default=None) for name, numbers in found.items()}


def small(device: torch.device) -> Callable[[], object]:
    """SGD over two tensors, forgotten by the compiler."""
    torch._dynamo.reset()
    return contenders.compiled(SGD)(Work("written", [(64, 64)] * 2).parameters(device)).step


def said_by(setting: str, device: torch.device) -> Row:
    """What a setting of TORCH_LOGS prints: lines, paths of code, code."""
    from torch._inductor import config

    step, heard = small(device), io.StringIO()
    with contextlib.redirect_stderr(heard):  # where the handler that is made now writes to
        if setting == "output_code":
            torch._logging.set_logs(output_code=True)
        else:
            torch._logging.set_logs(inductor=logging.INFO)
        with config.patch({"force_disable_caches": True}):
            step()
        torch._logging.set_logs()
    said = heard.getvalue()
    paths = len(re.findall(r"Output code written to: \S+\.py", said))
    return {"lines": said.count("\n"), "paths": paths, "code": "async_compile" in said}


def files(device: torch.device) -> Row:
    """What the debug setting leaves in its folder."""
    from torch._inductor import config

    with tempfile.TemporaryDirectory() as folder:
        with config.patch({"trace.enabled": True, "trace.debug_dir": folder, "force_disable_caches": True}):
            small(device)()
        names = sorted({path.name for path in Path(folder).rglob("*.*") if path.is_file()})
    return {"lines": None, "paths": len(names), "code": "output_code.py" in names, "names": names}


def graph(device: torch.device) -> Row:
    """Name, operator, kernels that compute it, and inputs of each node of AdamW's graph, after Inductor's fusion."""
    from torch._inductor import config

    kernels: dict[Any, set[int]] = {}

    def look(scheduled: list[Any]) -> list[Any]:
        for i, kernel in enumerate(scheduled):
            for part in kernel.get_nodes():
                for origin in getattr(part.node, "origins", ()):
                    kernels.setdefault(origin, set()).add(i)
        return scheduled

    with config.patch({"_post_fusion_custom_pass": look}):
        codes(ADAMW_LIST, device)
    nodes = next(iter(kernels)).graph.nodes
    through = {node: node.args[0] for node in nodes if "getitem" in str(node.target)}
    return {"nodes": [
        [node.name, node.op, sorted(kernels.get(node, ())), [through.get(x, x).name for x in node.all_input_nodes]]
        for node in nodes if node.op != "output" and node not in through
    ]}  # fmt: skip


def derive(rows: Rows) -> Rows:
    """Nodes and kernels of the graph, counted."""
    graphs = [len({kernel for _, _, kernels, _ in row.get("nodes", ()) for kernel in kernels}) for row in rows]
    return Rows({**row, "count": len(row["nodes"]), "kernels": found} if "nodes" in row else row
                for row, found in zip(rows, graphs, strict=True))  # fmt: skip


def texts(rows: Rows) -> str | None:
    """The kernel that is kept, and the functor of ours."""
    kept = [f"{row['case']}:\n\n```{row['language']}\n{row['text'].rstrip()}\n```" for row in rows.where(what="text")]
    return "\n\n".join(kept) or None


TABLES = [
    Table("Inductor's code for a step over two tensors on {device}", {
        "step": "case", "kernels": "kernels", "their calls": "calls", "loads": "loads", "stores": "stores",
        "tmp": "intermediates", "copy_": "copies", "registers": "registers", "spilled": "spills",
    }, where={"what": "code"}),
    Table("ways to the code", {
        "way": "case", "lines": "lines", "paths or files": "paths", "the code itself": yes_or_no("code"),
    }, where={"what": "way"}),
    Table("where the message of a mistake points", {
        "mistake in": "case", "error": "error", "file and line of the mistake": yes_or_no("named"), "it says": "at",
    }, where={"what": "mistake"}),
]  # fmt: skip
PLOTS = [Plot("graph", coloured, where={"what": "graph"})]
TEXTS = [Text("generated", texts)]
