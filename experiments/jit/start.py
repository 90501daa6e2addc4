"""How long does a process wait for its first step, by when and by what the step was compiled?

Answer: see notes/jit_or_aot.md.

The clock starts when torch is imported, parameters and gradients are made and an optimizer of torch is constructed,
which loads much of torch; it stops when the first step is done.  So a way's imports, its compiling or loading, and the
step are in it.  *Cold* are empty caches, *warm* is what the cold process left in them.  Each is a process of its own,
whose times count if four of its steps are right, and finds no program in its PATH: a way that needs a compiler fails
there, and is started again with those that there are.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.clock import series
from experiments.lab import Page, Row, Rows, Run
from experiments.pictures import BLUE, GRAY, Bars
from experiments.works.fresh import empty_caches, fresh
from experiments.works.models import HYPER, Bound, Work
from experiments.works.reference import Reference
from experiments.works.wheels import built_wheel

# --- AdamW over one list of tensors in every way to compile it: late, in the process that steps, or early, before it

Params = list[torch.nn.Parameter]
Step = Callable[[], object]
OURS, ON_CPU, AHEAD = "PagedAdamW", "PagedAdamW on a CPU", "C++ extension, built ahead"

#: A row of the list is four addresses, and how many elements lie there; on a GPU a column of blocks does a row.
KERNEL = r"""
#define SCALARS double shrink, double beta1, double beta2, double rate, double root, double eps
#define GIVEN shrink, beta1, beta2, rate, root, eps
#ifndef __CUDACC__
#define __device__
#endif
static __device__ void update(const long long* row, long long i, SCALARS) {
    float *param = (float*)row[0], *first = (float*)row[2], *second = (float*)row[3];
    const float grad = ((const float*)row[1])[i];
    const float m = first[i] += (float)(1 - beta1) * (grad - first[i]);
    const float v = second[i] = (float)beta2 * second[i] + (float)(1 - beta2) * grad * grad;
    param[i] = (float)shrink * param[i] - (float)rate * m / (sqrtf(v) / (float)root + (float)eps);
}
#ifdef __CUDACC__
extern "C" __global__ void adamw(const long long* rows, SCALARS) {
    const long long *row = rows + 5 * blockIdx.y, stride = gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < row[4]; i += stride) update(row, i, GIVEN);
}
#endif
"""
BLOCKS, THREADS = 8, 256
#: The kernel as an operator of torch.
EXTENSION = f"""
#include <cmath>
#include <torch/library.h>
{KERNEL}
static void step(int64_t rows, int64_t count, int64_t stream, SCALARS) {{
    const long long* row = (const long long*)rows;
#ifdef __CUDACC__
    adamw<<<dim3({BLOCKS}, count), {THREADS}, 0, (cudaStream_t)stream>>>(row, GIVEN);
#else
    for (; count--; row += 5)
        for (long long i = 0; i < row[4]; ++i) update(row, i, GIVEN);
#endif
}}
TORCH_LIBRARY_FRAGMENT(late, m) {{
    m.def("step(int rows, int count, int stream, float a, float b, float c, float d, float e, float f) -> ()", &step);
}}
"""
SETUP = """
from setuptools import setup
from torch.utils import cpp_extension as cpp
extensions = [cpp.{kind}("late", [{file!r}])]
setup(name="late", version="1.0", ext_modules=extensions, cmdclass={{"build_ext": cpp.BuildExtension}})
"""


@dataclass(frozen=True)
class Way:
    """A way to compile the update.

    Attributes:
        start: of parameters with gradients, and the folder with what was built ahead; returns a step.
        devices: of machines on which it is measured.
        on_cpu: whether it steps on the CPU there, too.
        build: of a device and a folder: builds ahead; returns the tag of the wheel.
        slow: whether a cold start takes many seconds: toys do without it.
        repeats: how often it is started, with cold and with warm caches.
    """

    start: Callable[[Params, Path], Step]
    devices: Sequence[str] = ("cuda",)
    on_cpu: bool = False
    build: Callable[[torch.device, Path], str] | None = None
    slow: bool = False
    repeats: int = 1


def work(count: int) -> Work:
    """So many tensors, too small for their bytes to count."""
    return Work(f"{count} x 64²", [(64, 64)] * count)


def scalars(step: int) -> tuple[float, ...]:
    """What depends on hyperparameters alone, in the order of ``SCALARS``."""
    lr, (beta1, beta2) = HYPER["lr"], HYPER["betas"]
    rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    return 1 - lr * HYPER["weight_decay"], beta1, beta2, rate, root, HYPER["eps"]


def lists(params: Params) -> list[list[torch.Tensor]]:
    """Values, gradients, and two lists of moments."""
    values, grads = [p.detach() for p in params], [p.grad for p in params if p.grad is not None]
    return [values, grads, *([torch.zeros_like(value) for value in values] for _ in range(2))]


def by_addresses(params: Params, launch: Callable[..., object]) -> Step:
    """A step by the kernel: ``launch`` is given the rows, torch's stream and the scalars."""
    kept, steps = lists(params), itertools.count(1)
    rows = torch.tensor([[*(t.data_ptr() for t in row), row[0].numel()] for row in zip(*kept, strict=True)])
    rows = rows.to(params[0].device)
    stream = torch.cuda.current_stream().cuda_stream if rows.is_cuda else 0
    return lambda _kept=kept: launch(rows, stream, *scalars(next(steps)))  # type: ignore[misc]  # rows keep nothing


def by_operator(params: Params) -> Step:
    """A step by the operator that an extension has registered."""
    step = torch.ops.late.step
    return by_addresses(params, lambda rows, stream, *given: step(rows.data_ptr(), len(rows), stream, *given))


def update(lists: list[list[torch.Tensor]], rate: torch.Tensor, root: torch.Tensor) -> None:
    """The update in torch's own operators, for its compiler; every tensor is an argument."""
    params, grads, first, second = lists
    shrink, beta1, beta2, _, _, eps = scalars(1)
    torch._foreach_lerp_(first, grads, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
    below = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(second), root), eps)
    torch._foreach_mul_(params, shrink)
    torch._foreach_sub_(params, torch._foreach_mul(torch._foreach_div(first, below), rate))


def by_torch(params: Params, _: Path) -> Step:
    compiled, kept, steps = torch.compile(update), lists(params), itertools.count(1)
    return lambda: compiled(kept, *(torch.tensor(x, device=params[0].device) for x in scalars(next(steps))[3:5]))


def ours(params: Params, _: Path) -> Step:
    from pagedopt import PagedAdamW

    return PagedAdamW(params, **HYPER).step


def inline(params: Params, _: Path) -> Step:
    from torch.utils.cpp_extension import load_inline

    cpp, cuda = ("", [EXTENSION]) if params[0].is_cuda else (EXTENSION, None)
    load_inline("late", cpp, cuda, is_python_module=False, no_implicit_headers=True)
    return by_operator(params)


def unpacked(params: Params, folder: Path) -> Step:
    torch.ops.load_library(next((folder / "site").glob("*.so")))
    return by_operator(params)


def wheel(device: torch.device, folder: Path) -> str:
    """Build a wheel as a project with ``setup.py`` does, by pip and setuptools, and unpack it."""
    kind, file = ("CUDAExtension", "late.cu") if device.type == "cuda" else ("CppExtension", "late.cpp")
    (folder / file).write_text(EXTENSION)
    (folder / "setup.py").write_text(SETUP.format(kind=kind, file=file))
    made = built_wheel(folder, folder)
    zipfile.ZipFile(made).extractall(folder / "site")
    return made.stem.partition("-1.0-")[2]


BOTH = ("cuda", "cpu")
WAYS = {
    OURS: Way(ours, repeats=3),
    ON_CPU: Way(ours, BOTH, on_cpu=True),
    "torch.compile": Way(by_torch, BOTH, slow=True),
    "load_inline": Way(inline, BOTH, slow=True),
    AHEAD: Way(unpacked, BOTH, build=wheel, slow=True),
}


# --- the question

MEASURES = ("kernels", "launch", "tables", "optim", "system")
#: Tensors of 64²: of more a compiler on a CPU makes minutes of work.
TENSORS = {"cuda": 36, "cpu": 8}
#: Seconds after which a process is given up; that a user will wait for.
LIMIT, SOON = 150.0, 1.0


def started(name: str, device: str, count: int, folder: str, compilers: bool) -> Iterator[Row]:
    """In a process of its own: seconds until the first step of a way is done.

    Raises:
        AssertionError: the update is wrong.
    """
    if compilers:
        os.environ["PATH"] += f":{Path(sys.executable).parent}"  # pip puts ninja there
    else:
        os.environ["PATH"] = str(Path(folder) / "no programs")
        for variable in ("CC", "CXX", "CUDA_HOME"):
            os.environ.pop(variable, None)
    where = torch.device("cpu" if WAYS[name].on_cpu else device)
    params = work(count).parameters(where)
    torch.optim.AdamW(work(1).parameters(where), **HYPER)

    wait = torch.cuda.synchronize if where.type == "cuda" else (lambda: None)
    wait()
    begin = time.perf_counter()
    step = WAYS[name].start(params, Path(folder))
    step()
    wait()
    first = time.perf_counter() - begin
    error = Reference(work(count).parameters(where)).error(params, Bound(step, 1))
    if not error <= work(count).tolerance:
        raise AssertionError(f"its update is off by {error:.2g} of itself")
    yield {"first": first}


def reason(ended: str) -> str:
    """Of a process's last words the last line that names an error, or else the last."""
    lines = ended.strip().splitlines()
    return next((line for line in reversed(lines) if "Error" in line or "error:" in line), lines[-1])


def timed(repeats: int, *about: Any) -> Row:
    """Processes one after the other, each pair with caches of its own; of toys (0 repeats) a cold one alone.

    Raises:
        RuntimeError: one did not end well; with its last words.
    """
    found: dict[str, list[Row]] = {"cold": [], "warm": []}
    for _ in range(repeats or 1):
        with empty_caches() as caches:
            for kind in list(found)[: 1 + bool(repeats)]:
                one = fresh(started, *about, limit=LIMIT, caches=caches)
                if one.ended:
                    raise RuntimeError(reason(one.ended))
                found[kind].append({**one.row, "process": one.seconds})

    def seconds(kind: str, column: str) -> dict[str, Any] | None:
        return series([row[column] for row in found[kind]], "wall") if found[kind] else None

    times = {"cold": seconds("cold", "first"), "warm": seconds("warm", "first")}
    return {**times, "process": seconds("cold", "process"), "again": bool(repeats)}


def of_way(way: Way, repeats: int, *about: Any) -> Row:
    """Build ahead, if a way does, and start it without compilers, or else with them."""
    begin, (_, device, _, folder) = time.perf_counter(), about
    tag = way.build(torch.device(device), Path(folder)) if way.build else ""
    ahead = {"tag": tag, "build": series([time.perf_counter() - begin], "wall") if way.build else None}
    try:
        return {**ahead, **timed(repeats, *about, False), "refusal": ""}
    except RuntimeError as error:
        return {**ahead, **timed(repeats, *about, True), "refusal": str(error)}


def measure(run: Run) -> Iterator[Row]:
    """A row per way: seconds, and whether it starts without a compiler."""
    kind, count = run.device.type, run.size(TENSORS[run.device.type], 2)
    here = {name: way for name, way in WAYS.items() if kind in way.devices and not (run.quick and way.slow)}
    for name, way in run.each(here.items()):
        with run.attempt(name, () if OURS in name else (RuntimeError,)), empty_caches() as folder:
            row = of_way(way, run.size(way.repeats, 0), name, str(run.device), count, str(folder))
            yield {"case": name, "device": kind, "tensors": count, **row}
    if missing := [name for name in WAYS if name not in here]:
        run.leave_out(f"{', '.join(missing)}: need a GPU{', or are too slow for toys' if run.quick else ''}")


def convenient(rows: Rows) -> str:
    """Ways that start soon with empty caches, without a compiler, and with nothing built ahead."""
    soon = [row for row in rows if row["cold"]["median"] <= SOON and not row["refusal"] and row["build"] is None]
    names = ", ".join(row["case"] for row in soon if row["device"] == "cuda")
    return names and f"Start cold within {SOON:g} s, with no compiler and no wheel of their own: {names}."


def color(name: str) -> str:
    """Ours, and others."""
    return BLUE if OURS in name else GRAY


PANELS = [
    Bars(title="cold: with empty caches", unit="s", name="case", length="cold", colors=color),
    Bars(title="warm: with filled ones", unit="s", name="case", length="warm", colors=color, where={"again": True}),
]


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, a picture, and what is held to a limit."""
    page.table("{tensors} tensors of 64² on {device}, wall times", rows, {"way": "case", "built ahead, s": "build",
        "cold, s": "cold", "warm, s": "warm",
        "without a compiler": lambda row: row["refusal"][:60] or "yes"})  # fmt: skip
    page.say(convenient(rows))
    page.picture("start", rows, PANELS, "Only code built ahead starts at once: AdamW, {tensors} tensors, {device}")
    page.bar("first step of ours, cold", rows.where(case=OURS), "cold", "≤ 0.5 s")
    page.bar("first step of ours, warm", rows.where(case=OURS), "warm", "≤ 0.3 s")
