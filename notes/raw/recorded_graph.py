"""Is a graph that recorded the calls of a staged step as good as a graph of nodes?  For the tree of e9808d83, on a GPU:

    PYTHONPATH=. python3 recorded_graph.py FILE.json

The calls of the step are captured in relaxed mode into the same graph, with events of the capture's own; fences are
recorded by ``cuEventRecordWithFlags(EXTERNAL)``.  Copies go as they go call by call (one 3D copy of two sections), or
range by range.
"""

import importlib
import json
import os
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from experiments.overlap.loader import MODELS_STREAM, OWN, copies

from experiments.child import only
from experiments.works.hidden import HIDDEN, maker, timed
from experiments.works.training import Load, Mark, Training
from pagedopt import PagedAdamW
from pagedopt.kernels import cuda
from pagedopt.launch import staged_graph
from pagedopt.launch.on_device import DeviceStep
from pagedopt.paging.visits import passes
from pagedopt.placements.movers import SLOTS, StagedMover, copies_of
from pagedopt.planning.sizes import SIZES
from pagedopt.system.driver import Event, bindings, call
from pagedopt.transports.transport import argument_at


class Captured(Event):
    """An event of a capture: before it is recorded there, nobody waits for it."""

    recorded = False

    def record(self, stream):
        self.recorded = True
        super().record(stream)

    def hold(self, stream):
        if self.recorded:
            super().hold(stream)


class Recorder(StagedMover):
    """The calls of :class:`StagedMover` over the slots of a graph, with streams and events of their own."""

    def __init__(self, of, stream, by_range):
        device = of._nodes.device
        event = partial(Captured, device)
        three = ([event() for _ in range(SLOTS)] for _ in range(3))
        ring = SimpleNamespace(address=of._slots.address, up=torch.cuda.Stream(device), down=torch.cuda.Stream(device),
                               began=event(), ended=event(), copied_bytes=of.copied_bytes)  # fmt: skip
        ring.filled, ring.updated, ring.emptied = three
        super().__init__(ring, of._arenas, stream)
        self._by_range = by_range

    def begin(self):
        self.fetch_behind_all()

    def finish(self):
        self.wait_for_all()

    def _copy(self, move, stream, to_device):
        for copy in copies_of(self.ring, self.arenas[move.arena], move, to_device):
            if self._by_range:
                for name, *given in copy.calls(stream):
                    call(name, *given)
            else:
                copy.queue(stream)
            self.ring.copied_bytes[not to_device] += copy.ranges * copy.nbytes


def add_recorded(nodes, mover, actions, kernel, table, at, fences=(), by_range=True):
    """What ``add_staged`` does, by calls that are captured into the same graph."""
    d, stream = bindings(), torch.cuda.Stream(nodes.device)
    handle, count, waiting = stream.cuda_stream, 0, list(reversed(fences))
    relaxed = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    recorder = Recorder(mover, handle, by_range)
    call("cuStreamBeginCaptureToGraph", handle, nodes.graph, [], [], 0, relaxed)
    external = int(d.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)

    def launch(span):
        nonlocal count
        if span[0] < span[1]:
            kernel(argument_at(at.address, table, span), span[1] - span[0], cuda.Stream(handle))
            count += 1
        if waiting and (fence := waiting.pop()) is not None:
            call("cuEventRecordWithFlags", fence.handle, handle, external)

    if isinstance(at, DeviceStep):
        prologue, numbers, rows = at.prologue(table)
        prologue(numbers, rows, cuda.Stream(handle))
    for _ in passes(actions, launch, recorder):
        pass
    call("cuStreamEndCapture", handle)
    return count


WAYS = {"nodes": staged_graph.add_staged, "calls, range by range": add_recorded,
        "calls, 3D copies": partial(add_recorded, by_range=False)}  # fmt: skip


def install(way):
    staged_graph.add_staged = WAYS[way]  # a capture of the user's keeps its nodes


def measured(way, state):
    """Under the forward: an iteration, the host, a loader's copies."""
    install(way)
    run = SimpleNamespace(device=torch.device("cuda", 0), size=lambda full, _: full)
    training = Training(run.device, SIZES["gpt2-xl"], Load(), maker(HIDDEN, state))
    training.optimizer.attach(training.model)
    row = timed(run, training)
    (graphs,) = [list(training.optimizer.store.graphs.alive)]
    waits = {name: copies(run, training, name, 12 if name == OWN else 40) for name in (OWN, MODELS_STREAM)}
    yield {"way": way, "state": state, **row, "waits": waits, "graphs": len(graphs),
           "graph_mib": [graph.nbytes / 2**20 for graph in graphs]}  # fmt: skip


def alone(way, state):
    """The step alone, over 1.56 B parameters: GPU ms, the host's time of a launch, and its bits."""
    install(way)
    torch.manual_seed(0)
    params = [torch.randn(16 << 20, device="cuda", requires_grad=True) for _ in range(93)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer, host, gpu = PagedAdamW(params, state_format=state, device_budget=0, lr=1e-3), [], []
    inner = staged_graph.BuiltGraph.launch

    def launch(self, stream):
        begin = time.perf_counter()
        inner(self, stream)
        host.append(1e3 * (time.perf_counter() - begin))

    staged_graph.BuiltGraph.launch = launch
    device = torch.device("cuda", 0)
    for _ in range(12):
        torch.cuda.synchronize()
        begin = Mark(device)
        optimizer.step()
        end = Mark(device)
        torch.cuda.synchronize()
        gpu.append(end.since(begin) / 1e3)
    bits = [int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in params]
    bits += [int(s.cpu().view(torch.uint8).to(torch.int64).sum()) for p in params[:8]
             for s in optimizer.state[p].values() if s.numel() > 1]  # fmt: skip
    yield {"way": way, "state": state, "gpu_ms": sorted(gpu[4:]), "launch_ms": sorted(host), "bits": hash(tuple(bits))}


def main():
    """All of it; the tests of fences with each way."""
    found = {
        "commit": os.environ.get("PAGEDOPT_COMMIT"),
        "gpu": torch.cuda.get_device_name(),
        "alone": [],
        "hidden": [],
    }
    for name, measure, states in (("alone", alone, ("int8", "float32")), ("hidden", measured, ("int8", "float32"))):
        for state in states:
            for way in WAYS:
                try:
                    row = only(measure, way, state, limit=60)
                except RuntimeError as error:
                    row = {"way": way, "state": state, "ended": str(error)[-600:]}
                found[name].append(row)
                shown = row.get("gpu_ms") or row.get("time") or row.get("ended")
                print(name, state, way, shown, row.get("launch_ms", [])[-4:], row.get("bits"), flush=True)
                with open(sys.argv[1], "w") as file:
                    json.dump(found, file, indent=1)


if __name__ == "__main__":
    if sys.argv[1] == "--tests":
        install(sys.argv[2])
        sys.exit(pytest.main(["-q", "-n", "0", "-x", "-p", "no:cacheprovider", *sys.argv[3:]]))
    importlib.import_module("recorded_graph").main()
