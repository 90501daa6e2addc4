"""An optimizer whose every step is captured into a graph of its own, which is then replayed."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def capturing(kind: Any) -> Any:
    """A class of optimizers that steps so; state is made with it, as a first step cannot make it in a capture."""

    class Captured(kind):  # type: ignore[misc]
        def __init__(self, params: Any, **hyper: Any) -> None:
            flag = {"capturable": True} if "capturable" in kind.__init__.__annotations__ else {}
            super().__init__(params, **hyper, **flag, preallocate=True)
            self.side = torch.cuda.Stream()

        def step(self, closure: Any = None) -> None:
            graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                graph.capture_begin()  # torch.cuda.graph collects all garbage each time
                super().step()
                graph.capture_end()
                graph.replay()
            here.wait_stream(self.side)

    return Captured
