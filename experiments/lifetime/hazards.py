"""What does a step do whose list names memory that was freed, moved or handed to somebody else, and who notices?

Answer: see notes/pointer_lifetime.md.

Four parameters of 1, 2, 3, 4 and gradients of 1 that a step subtracts; between building a list and using it something
happens to the second parameter or to the gradients, and then memory is asked for, which others get.  Each hazard in a
process of its own, once for each way to hold the list: it writes into nobody
else's memory.

``owners``: parameters are 1 and gradients 1.  A list over them is copied, copied deeply, or pickled, and the copy is
used once: are the original's parameters 0 then?
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from experiments.child import Child
from experiments.clock import cycles_per_us
from experiments.lab import Page, Row, Rows, Run
from experiments.pictures import Matrix
from experiments.works.apart import rows_of
from pagedopt import DeviceTable, PagedSGD, Sweep, rule

ANSWERS = {"hazards": "pointer_lifetime", "owners": "pointer_lifetime"}
MEASURES = ("launch", "tables", "optim")
LIMIT = 60.0
# --- what happens to its tensors

HARMS, WRONG, CRASH, SILENT = "writes into another tensor", "wrong numbers", "crash", "writes into freed memory"
REFUSED, FOLLOWED, KEPT = "refused", "followed", "kept alive"
BAD = (HARMS, WRONG, CRASH, SILENT)
VICTIM, COUNT = 1, 4
#: Elements: what an allocator gives out again, and what it gives back to the system.
SMALL, LARGE = 1 << 18, 1 << 24
OTHERS, HOLD_US = 7.0, 600_000.0
#: The C library hands out the same memory again: pages of the system's own for each tensor, whatever was freed before.
SAME_AGAIN = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}


@dataclass(frozen=True)
class Hazard:
    """Something that a program does to its tensors between two steps.

    Attributes:
        act: does it; returns tensors that may have got the memory.
        late: it is done after the step was queued, on a stream that waits.
        quick: whether toys have it.
    """

    act: Callable[[User], list[torch.Tensor]]
    numel: int = SMALL
    late: bool = False
    quick: bool = False


def others(device: torch.device) -> list[torch.Tensor]:
    """Tensors of somebody else, who asks for memory now."""
    gc.collect()
    return [torch.full((SMALL,), OTHERS, device=device) for _ in range(4 * COUNT)]


def deleted(user: User) -> list[torch.Tensor]:
    """The model is gone, and the name of the optimizer."""
    device = user.params[0].device
    user.params, user.optimizer = [], None
    return others(device)


def given_back(user: User) -> list[torch.Tensor]:
    """The same, and the allocator gives its memory back."""
    user.params, user.optimizer = [], None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return []


def moved(user: User) -> list[torch.Tensor]:
    """As ``model.to(...)`` moves it."""
    p = user.params[VICTIM]
    p.data = p.data.clone()
    return others(p.device)


def swapped(user: User) -> list[torch.Tensor]:
    """The tensor stays, its storage is another."""
    p = user.params[VICTIM]
    with torch.no_grad():
        p.set_(p.detach().clone())  # type: ignore[call-overload]
    return others(p.device)


def shrunk(user: User) -> list[torch.Tensor]:
    """As sharding frees what it will gather again."""
    p = user.params[VICTIM]
    p.untyped_storage().resize_(0)
    return others(p.device)


def anew(user: User) -> list[torch.Tensor]:
    """``zero_grad(set_to_none=True)``, and a backward whose gradients are 3."""
    for p in user.params:
        p.grad = None
    found = others(user.params[0].device)
    for p in user.params:
        p.grad = torch.full_like(p, 3.0)
    return found


HAZARDS = {
    "deleted": Hazard(deleted, quick=True),
    "deleted and given back": Hazard(given_back, LARGE),
    "moved (p.data = …)": Hazard(moved),
    "storage swapped (set_)": Hazard(swapped),
    "shrunk (resize_(0))": Hazard(shrunk),
    "gradients made anew": Hazard(anew),
    "deleted, its step on another stream": Hazard(deleted, late=True),
    "gradients anew, their step on another stream": Hazard(anew, late=True),
}


def played(hazard: str, way: str, device: str) -> Iterator[dict[str, Any]]:
    """In the child: hold the list, let it happen, take the step, and look at everybody's numbers."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    asked, user = HAZARDS[hazard], User.of(COUNT, HAZARDS[hazard].numel, device)
    step = WAYS[way](user)
    for p in user.params:
        assert p.grad is not None
        p.grad.fill_(1.0)
    watched, said, strangers = weakref.ref(user.params[VICTIM]), "", []
    try:
        strangers = behind(asked, user, step) if asked.late else asked.act(user)
        if not asked.late:
            step()
        waited(device)
    except (RuntimeError, ValueError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
    if re.search(r"CUDA error|cudaError|CUDA_ERROR", said):
        yield {"outcome": CRASH, "elements": 0, "said": said[:300]}
        return
    harmed = int((torch.stack(strangers) != OTHERS).sum()) if strangers else 0
    held = [i for i, p in enumerate(user.params) if p.untyped_storage().nbytes()]
    wrong = 0 if said else sum(off(user, i, asked) for i in held)
    kept = KEPT if watched() is not None else SILENT
    right = kept if not user.params else FOLLOWED if len(held) == COUNT else SILENT
    outcome = HARMS if harmed else REFUSED if said else WRONG if wrong else right
    yield {"outcome": outcome, "elements": harmed or wrong, "said": said[:300]}


def off(user: User, i: int, asked: Hazard) -> int:
    """How many elements of a parameter are not what this step had to make of them."""
    due = i + 1.0 - (3.0 if asked.act is anew and not asked.late else 1.0)
    return int((user.params[i] != due).sum())


def behind(asked: Hazard, user: User, step: Callable[[], None]) -> list[torch.Tensor]:
    """The step is queued on a stream that waits; meanwhile it happens, on the main stream.

    Raises:
        AssertionError: the stream did not wait long enough to show anything.
    """
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(HOLD_US * cycles_per_us(torch.cuda.current_device())))
        step()
    strangers = asked.act(user)
    torch.cuda.current_stream().synchronize()
    assert not side.query(), "the stream did not wait long enough"
    return strangers


def waited(device: str) -> None:
    """Until the device has done what was queued."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


# --- a list of parameters and gradients that somebody holds from one step to the next: numbers, tensors, or a graph

BARE, TORCH, TORCH_GRAPH = "bare addresses", "torch", "torch, graph"
OURS, OURS_GRAPH = "pagedopt", "pagedopt, graph"
#: A row is one of :class:`pagedopt.DeviceTable`: addresses of a parameter and of its gradient, elements, 0.
CUDA = r"""
struct Row { float* param; const float* grad; unsigned long long numel, none; };
__device__ void subtract(const Row& row) {
    for (unsigned long long i = threadIdx.x; i < row.numel; i += blockDim.x) row.param[i] -= row.grad[i];
}
extern "C" __global__ void listed(const Row* rows) { subtract(rows[blockIdx.x]); }
"""


@rule
def minus(param, grad):
    return param - grad


@dataclass
class User:
    """Who has a model and an optimizer, and may let go of both."""

    params: list[torch.nn.Parameter]
    optimizer: Any = None

    @classmethod
    def of(cls, count: int, numel: int, device: str | torch.device) -> User:
        """Parameter i holds i + 1 everywhere, its gradient 0."""
        params = [torch.nn.Parameter(torch.full((numel,), i + 1.0, device=device)) for i in range(count)]
        for p in params:
            p.grad = torch.zeros_like(p)
        return cls(params)


def lists(user: User) -> list[list[torch.Tensor]]:
    """Parameters and gradients, as tables take them."""
    return [[p.detach() for p in user.params], [p.grad for p in user.params if p.grad is not None]]


def addresses(params: list[torch.nn.Parameter]) -> npt.NDArray[np.int64]:
    """A row for each: numbers, which keep nothing alive."""
    return np.array([[p.data_ptr(), p.grad.data_ptr(), p.numel(), 0] for p in params if p.grad is not None], np.int64)


@functools.cache
def kernel(name: str) -> Any:
    """Loaded when first asked for, which waits for the device."""
    import cupy

    found = cupy.RawKernel(CUDA, name)
    found.compile()
    return found


def launch(name: str, blocks: int, argument: Any) -> None:
    """On the current stream."""
    from pagedopt.kernels.cuda import Stream

    kernel(name)((blocks,), (256,), (argument,), stream=Stream(torch.cuda.current_stream().cuda_stream))


@functools.cache
def on_cpu() -> Callable[[npt.NDArray[np.int64]], None]:
    """The kernel for Numba."""
    import numba

    from pagedopt import kernels

    pointer: Any = kernels.pointer

    @numba.njit
    def subtract(rows):
        for row in rows:
            param = numba.carray(pointer(row[0]), row[2], np.float32)
            grad = numba.carray(pointer(row[1]), row[2], np.float32)
            for i in range(row[2]):
                param[i] -= grad[i]

    return subtract


def follow(rows: npt.NDArray[np.int64], device: torch.device) -> Callable[[], None]:
    """Update what lies at these addresses, whatever it is."""
    if device.type == "cpu":
        on_cpu()(rows[:0])
        return functools.partial(on_cpu(), rows)
    table = torch.from_numpy(rows).to(device)
    kernel("listed")
    return lambda: launch("listed", len(rows), table.data_ptr())


def bare(user: User) -> Callable[[], None]:
    """Addresses, and nothing else."""
    return follow(addresses(user.params), user.params[0].device)


def eager(make: Callable[..., Any], user: User) -> Callable[[], None]:
    """An optimizer, which has its parameters."""
    user.optimizer = make(user.params, lr=1.0)
    user.optimizer.step()
    return user.optimizer.step


def captured(make: Callable[..., Any], user: User) -> Callable[[], None]:
    """A graph of a step; of ours, it is asked before a replay, as long as the optimizer is there."""
    eager(make, user)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        user.optimizer.step()

    def replay() -> None:
        if hasattr(user.optimizer, "check_capture"):
            user.optimizer.check_capture()
        graph.replay()

    return replay


SGD = functools.partial(torch.optim.SGD, foreach=True)
#: Of a user, what updates the parameters from then on.
WAYS: dict[str, Callable[[User], Callable[[], None]]] = {
    BARE: bare,
    TORCH: functools.partial(eager, SGD),
    TORCH_GRAPH: functools.partial(captured, SGD),
    OURS: functools.partial(eager, PagedSGD),
    OURS_GRAPH: functools.partial(captured, PagedSGD),
}


# --- copies of a list

HOW: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda held: pickle.loads(pickle.dumps(held)),
}  # fmt: skip
ORIGINAL, OWN = "the original's", "its own"


def stepped(optimizer: Any, _: torch.device) -> None:
    """Of an optimizer whose parameters may have come without their gradients."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


#: How a list is made of parameters, and used on their device.
HOLDERS: dict[str, tuple[Callable[[User], Any], Callable[[Any, torch.device], object]]] = {
    BARE: (lambda user: addresses(user.params), lambda rows, device: follow(rows, device)()),
    "DeviceTable": (
        lambda user: DeviceTable(lists(user), writes=[0]), lambda table, device: follow(table.rows, device)()
    ),
    "Sweep": (lambda user: Sweep(minus, lists(user)), lambda sweep, _: sweep.run({})),
    "PagedSGD": (lambda user: PagedSGD(user.params, lr=1.0), stepped),
    "torch.optim.SGD": (lambda user: SGD(user.params, lr=1.0), stepped),
}  # fmt: skip


def used(device: str) -> Iterator[Row]:
    """In a process of its own, which a copy that names nobody's memory may end: whose parameters each copy updates."""
    for name, (make, use) in HOLDERS.items():
        for how, copied in HOW.items():
            user = User.of(2, 100, device)
            torch._foreach_add_(lists(user)[1], 1.0)
            held = make(user)  # lives on: what it points at is there
            try:
                use(copied(held), torch.device(device))
                own = all(float(p.detach().sum()) == 100 * (i + 1) for i, p in enumerate(user.params))
                found = OWN if own else ORIGINAL
            except Exception as error:
                found = f"refused: {type(error).__name__}"
            yield {"holder": name, "how": how, "device": torch.device(device).type, "updates": found}


def shared(rows: Rows) -> float:
    """Deep and pickled copies of ours that update what belongs to the original."""
    return float(sum(row["updates"] == ORIGINAL and row["how"] != "copy" and row["holder"] != BARE for row in rows))


# --- the question


def in_child(hazard: str, way: str, device: str) -> Row:
    """One hazard, one way: a process that dies is an outcome.

    Raises:
        RuntimeError: Python ended it, with an error that is none of the hazard's.
    """
    child = Child(played, hazard, way, device, limit=LIMIT, environment=SAME_AGAIN)
    rows = list(child)
    if child.ended and child.ended.startswith("ended with 1:"):
        raise RuntimeError(child.ended)
    found = rows[0] if rows else {"outcome": CRASH, "elements": 0, "said": str(child.ended)[:300]}
    return {"hazard": hazard, "way": way, **found}


def measure(run: Run) -> Iterator[Row]:
    """A row per hazard and way: outcome, elements that are wrong, what was said."""
    if run.part == "owners":
        yield from rows_of(run, used, str(run.device), limit=LIMIT)
        return
    cuda = run.device.type == "cuda"
    if not cuda:
        run.left_out.append("other streams, graphs: need a GPU")
    ways = run.size([way for way in WAYS if cuda or "graph" not in way], [BARE, OURS])
    jobs = [(name, way) for name, hazard in HAZARDS.items() for way in ways
            if (cuda or not hazard.late) and (hazard.quick or not run.quick)]  # fmt: skip
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(in_child, *job, str(run.device)) for job in jobs]
        for job, future in zip(run.each(jobs), futures, strict=True):
            with run.attempt(", ".join(job)):
                yield {"what": "hazard", "device": run.device.type, **future.result()}


COUNTED = {"harms": HARMS, "wrong": WRONG, "crashes": CRASH, "silent": SILENT}


def derive(rows: Rows) -> Rows:
    """In the order of hazards, and a row per way: how often each outcome came."""
    if "holder" in rows[0]:
        return rows
    rows = Rows(sorted(rows, key=lambda row: list(HAZARDS).index(row["hazard"])))
    sums = Rows()
    for group in rows.groups("way"):
        counts = {name: len(group.where(outcome=outcome)) for name, outcome in COUNTED.items()}
        bad = sum(row["outcome"] in BAD for row in group)
        sums.append({"what": "sum", "way": group[0]["way"], "hazards": len(group), **counts, "bad": bad})
    return Rows([*rows, *sums])


def shown(row: Row) -> str:
    """The outcome, and of how many elements."""
    return row["outcome"] + (f" ({row['elements']:,})" if row["elements"] else "")


def unnoticed(rows: Rows) -> tuple[float, str] | None:
    """Hazards that ours lets through where torch does not, eager and in graphs, and those that get through both."""
    known = rows.where(what="hazard")
    bad = {way: {row["hazard"] for row in known.where(way=way) if row["outcome"] in BAD} for way in WAYS}
    both = [*sorted(bad[OURS] & bad[TORCH]), *sorted(bad[OURS_GRAPH] & bad[TORCH_GRAPH])]
    ours = len(bad[OURS] - bad[TORCH]) + len(bad[OURS_GRAPH] - bad[TORCH_GRAPH])
    return (ours, f" (both let through: {'; '.join(both)})" if both else "") if known.where(way=OURS) else None


PANELS = [Matrix(title="What happens to a list whose tensors are no longer where they were", down="hazard",
                 across="way", text="outcome", bad=BAD, fine=(REFUSED, FOLLOWED, KEPT))]  # fmt: skip


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    if page.section == "owners":
        page.grid("whose parameters a copy updates, on {device}", rows, "holder", "how", "updates", "copy of", str)
        page.bar("deep copies of tables and optimizers that update the original's tensors", rows, shared, "≤ 0")
        return
    known = rows.where(what="hazard")
    page.grid("what a step does on {device}", known, "hazard", "way", shown, "hazard", str)
    page.picture("hazards", known, PANELS)
    page.bar("hazards that pagedopt lets through, and torch does not", rows, unnoticed, "≤ 0")
