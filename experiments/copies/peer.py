"""What may one GPU do with the memory of another: by a call, by a kernel, over one list that names tensors of both?

Answer: see notes/copies.md.

All tensors that are copied lie on one GPU, or every second one on either; the copies are checked byte by byte.  Before
access is allowed a copy goes another way, which is measured first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from experiments.clock import Case
from experiments.columns import gb_per_s
from experiments.comparing import on_one_clock, over
from experiments.lab import Page, Row, Rows, Run
from experiments.pictures import Bars
from experiments.works.list_copy import Call, checked, in_torch, over_a_list
from pagedopt.system.driver import bindings, call

NEEDS_GPU = True
MEASURES = ("launch", "tables")
GPUS = 2
NBYTES, PIECES = 1 << 28, 64
OFF, API, TORCH = "cuMemcpyPeerAsync, access off", "cuMemcpyPeerAsync", "torch copy_"
PULL, PUSH, MIXED = "a kernel that reads there", "a kernel that writes there", "a kernel over tensors of both"
HOST = "through pinned host memory"


def between(one: torch.Tensor, other: torch.Tensor) -> Call:
    """The API's copy, from a GPU to another."""
    contexts = [call("cuDevicePrimaryCtxRetain", t.device.index) for t in (one, other)]

    def run() -> None:
        stream = torch.cuda.current_stream(one.device).cuda_stream
        call("cuMemcpyPeerAsync", other.data_ptr(), contexts[1], one.data_ptr(), contexts[0], one.nbytes, stream)

    return run


def through_the_host(one: torch.Tensor, other: torch.Tensor) -> Call:
    """Down, and up; piece by piece, so that both go on at once."""
    pinned = torch.empty_like(one, device="cpu", pin_memory=True)

    def run() -> None:
        up = torch.cuda.current_stream(other.device)
        for a, b, c in zip(one.chunk(PIECES), pinned.chunk(PIECES), other.chunk(PIECES), strict=True):
            b.copy_(a, non_blocking=True)
            up.wait_event(torch.cuda.current_stream(one.device).record_event())
            with torch.cuda.stream(up):
                c.copy_(b, non_blocking=True)
        torch.cuda.current_stream(one.device).wait_event(up.record_event())

    return run


def allowed(one: int, other: int) -> dict[str, Any]:
    """What the driver says of two GPUs."""
    d = bindings()
    names = {"access": "ACCESS_SUPPORTED", "rank": "PERFORMANCE_RANK", "atomics": "NATIVE_ATOMIC_SUPPORTED"}
    kinds = d.CUdevice_P2PAttribute
    asked = {name: getattr(kinds, f"CU_DEVICE_P2P_ATTRIBUTE_{text}") for name, text in names.items()}
    return {name: int(call("cuDeviceGetP2PAttribute", kind, one, other)) for name, kind in asked.items()}


def measure(run: Run) -> Iterator[Row]:
    """A row of what the driver says, and one per way: times by the first GPU, bytes that crossed."""
    if torch.cuda.device_count() < 2:
        run.leave_out("one GPU is here, it needs two")
        return
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    yield {"what": "said", "gpu": torch.cuda.get_device_name(there), **allowed(0, 1)}
    torch.cuda.set_device(here)
    run.rounds, run.seconds = run.size((20, 0.5), (3, 0.05))
    numel = run.size(NBYTES, 1 << 16) // 4
    one, other = torch.rand(numel, device=here), torch.zeros(numel, device=there)
    yield from timed(
        run, {OFF: partial(between, one, other), HOST: partial(through_the_host, one, other)}, [one], [other]
    )
    in_torch([one], [other])()  # torch allows access, in both directions
    for device, peer in ((here, there), (there, here)):
        with torch.cuda.device(device), run.attempt("access", (Exception,)):
            access(peer.index)
    yield from timed(run, {
        API: partial(between, one, other), TORCH: partial(in_torch, [one], [other]),
        PUSH: partial(over_a_list, [one], [other], here),
    }, [one], [other])  # fmt: skip
    yield from timed(run, {PULL: partial(over_a_list, [other], [one], here)}, [other], [one])
    halves = list(one.chunk(PIECES)), list(other.chunk(PIECES))
    sources = [halves[i % 2][i] for i in range(PIECES)]
    targets = [torch.empty_like(t, device=here if t.device == there else there) for t in sources]
    yield from timed(run, {MIXED: partial(over_a_list, sources, targets, here)}, sources, targets)


def access(peer: int) -> None:
    """Let kernels of the current GPU follow addresses of the other; it may have been allowed before."""
    context = call("cuDevicePrimaryCtxRetain", peer)
    (code,) = bindings().cuCtxEnablePeerAccess(context, 0)
    if code.name not in ("CUDA_SUCCESS", "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"):
        raise RuntimeError(f"cuCtxEnablePeerAccess: {code.name}")


def timed(run: Run, ways: dict[str, Any], sources: list[torch.Tensor], targets: list[torch.Tensor]) -> Iterator[Row]:
    """Those that copy rightly, in turn."""
    cases = []
    for name, make in ways.items():
        with run.attempt(name, (Exception,)):
            cases.append(Case(name, checked(make(), sources, targets)))
    yield from run.time(cases, what="copy", bytes=sum(t.nbytes for t in sources))


def derive(rows: Rows) -> Rows:
    """GB/s, and how much of the API's copy that is; of a list of both, each direction carries half."""
    known = on_one_clock(rows.where(what="copy"))
    api = (known.first(case=API) or {}).get("time")
    gpu = (rows.first(what="said") or {}).get("gpu", "GPU")
    more = [
        {**row, "gpu": gpu, "rate": gb_per_s("bytes", "time")(row), "of_api": over(api, row["time"])} for row in known
    ]
    return Rows([*rows.where(what="said"), *more])


def report(page: Page, rows: Rows) -> None:
    """Tables, a picture, and what is held to a limit."""
    page.table("{bytes:,} bytes from one {gpu} to another, {clock}", rows.where(what="copy"),
        {"by": "case", "µs": "time", "GB/s": "rate", "÷ the API's": "of_api"})  # fmt: skip
    page.picture("peer", rows.where(what="copy"), [Bars(name="case", length="rate", unit="GB/s",
        title="From one {gpu} to another: slow through the host")])  # fmt: skip
    for name in (PULL, PUSH):
        page.bar(f"{name}, of the API's copy", rows.where(what="copy", case=name), "of_api", "≥ 0.85 x")
