"""CUDA graphs of what a function queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(function: Callable[[], Any], warm: int = 3) -> Callable[[], Any]:
    """A function that replays what another, called ``warm`` times first, queues.

    The other lives as long as the replay: a graph writes to its memory.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()

    def replay(_function: Callable[[], Any] = function) -> Any:
        graph.replay()
        return out

    return replay
