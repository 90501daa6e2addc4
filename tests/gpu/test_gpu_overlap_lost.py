"""On a GPU: memory that was freed while an update is queued is not written by it, whoever has it by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support import NEEDED
from staged import both_ways

from pagedopt.optim.queue import QueuedStep
from tests.optim.test_overlap_lost import REPLACED, pending

pytestmark = [both_ways, *NEEDED, pytest.mark.timeout(60)]
#: About 50 ms.
SPIN = 100_000_000


@pytest.mark.parametrize("name", [name for name in REPLACED if "shared" not in name])
def test_memory_that_was_freed_is_not_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph, which is not launched; and call by call, where the update is in its stream by then."""
    launch_on = QueuedStep._launch_on

    def late(self: QueuedStep, side: torch.cuda.Stream, *launches: Any) -> None:
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
        launch_on(self, side, *launches)

    monkeypatch.setattr(QueuedStep, "_launch_on", late)
    loop = pending(device="cuda")
    size = loop.models[0][0].weight.numel()  # type: ignore[index]
    REPLACED[name](loop)
    others = [torch.full((size,), 7.0, device="cuda") for _ in range(8)]
    with pytest.raises(RuntimeError, match="given other memory before it was waited for"):
        loop.opts[0].wait()
    torch.cuda.synchronize()
    assert all(bool((each == 7).all()) for each in others)
    with pytest.raises(RuntimeError, match=r"damaged: .* given other memory"):
        loop.opts[0].step()
