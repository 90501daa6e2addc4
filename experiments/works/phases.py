"""Where a compilation spends its time, in phases of which each moment belongs to one.

    with recorded() as events:
        step()
    exclusive(events)      # {"Dynamo traces": 0.41, "AOTAutograd": 0.56, …} in seconds

torch times its compiler in intervals that lie within each other, and adds each up as it is
(``torch._dynamo.utils.compilation_time_metrics``).  Here a moment belongs to the innermost interval around it, and that
to the phase that its name stands for, or else to that of the interval around it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

LOADS, DYNAMO, AOT, GRAPH, KERNELS, BUILD, CACHES = (
    "what is imported", "Dynamo traces", "AOTAutograd", "Inductor, graph", "Inductor, kernels", "Triton or g++",
    "caches",
)  # fmt: skip
#: How torch's names of what belongs to a phase begin, in the order in which a first step goes through them.
PHASES: dict[str, tuple[str, ...]] = {
    LOADS: (),  # before there is a step: no name of torch's
    DYNAMO: ("dynamo", "entire_frame_compile", "_compile.", "compile_attempt", "bytecode_tracing", "build_guards"),
    AOT: ("OutputGraph.call_user_compiler", "backend_compile", "create_aot_dispatcher", "aot_"),
    GRAPH: ("compile_fx", "inductor_compile", "fx_codegen", "_recursive", "GraphLowering.run", "additional_fake"),
    KERNELS: ("GraphLowering.co", "Scheduler", "PythonWrapperCodegen"),
    BUILD: ("compile_file", "async_compile", "CachingAutotuner", "StaticAutotuner", "reload_kernel_in_parent"),
    CACHES: ("AOTAutogradCache", "FxGraphCache", "fx_graph_cache", "inductor_codecache", "TritonBundler", "CacheBase"),
}


class Event(NamedTuple):
    """The begin or the end of an interval, and when (ns)."""

    begins: bool
    name: str
    now: int


@contextlib.contextmanager
def recorded() -> Iterator[list[Event]]:
    """Intervals of torch's compiler in this thread."""
    from torch._dynamo.utils import ChromiumEventLogger as Logger

    events, mine = list[Event](), threading.get_ident()

    def listening(method: str, begins: bool) -> Any:
        told = getattr(Logger, method)

        def tell(self: Any, event_name: str, time_ns: int, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == mine:
                events.append(Event(begins, event_name, time_ns))
            return told(self, event_name, time_ns, *args, **kwargs)

        return mock.patch.object(Logger, method, tell)

    with listening("log_event_start", True), listening("log_event_end", False):
        yield events


def phase_of(name: str) -> str | None:
    """The phase that a name of torch's stands for; None: that of what it lies in."""
    return next((phase for phase, begins in PHASES.items() if name.startswith(begins)), None)


def exclusive(events: Sequence[Event]) -> dict[str, float]:
    """Seconds of each phase; what lies in no interval of a known name is in none."""
    found = dict.fromkeys(PHASES, 0.0)
    around: list[tuple[str, str | None]] = []
    last = 0
    for begins, name, now in events:
        if around and (phase := around[-1][1]):
            found[phase] += (now - last) / 1e9
        last = now
        if begins:
            around.append((name, phase_of(name) or (around[-1][1] if around else None)))
        elif any(name == open_ for open_, _ in around):
            while around.pop()[0] != name:  # what an exception has left open
                pass
    return found
