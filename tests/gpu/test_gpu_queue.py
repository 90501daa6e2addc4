"""A CUDA state dict through a ``torch.multiprocessing`` queue; torch's own goes first, as not every system shares."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from gpu_support import NEEDED, parameters, steps
from paths import HELPERS, ROOT
from torch.multiprocessing import reductions

from pagedopt import PagedAdamW

pytestmark = NEEDED


@functools.cache
def sent(options: str) -> tuple[list[Any] | None, str]:
    """What ``queue_apart`` printed, or None, and its errors."""
    command = [sys.executable, str(HELPERS / "queue_apart.py"), options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, check=False)
    return (json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else None), run.stderr


OURS: dict[str, dict[str, Any]] = {
    "mapped": {"device_budget": 0},
    "half": {"device_budget": "6MiB"},
    "managed": {"placement": "managed"},
    "host": {"placement": "host"},
}


@pytest.mark.parametrize("options", [{}, *OURS.values()], ids=["resident", *OURS])
def test_a_state_dict_goes_through_a_queue_and_back(options: dict[str, Any]) -> None:
    theirs, errors = sent("null")
    if theirs is None:
        said = [line for line in errors.splitlines() if "Error" in line]
        pytest.skip(f"torch's own state cannot be sent here: {said}")
    ours, errors = sent(json.dumps(options))
    assert ours == theirs == [True, True, True, True, 0], errors


@pytest.mark.parametrize("options", OURS.values(), ids=OURS)
def test_what_is_sent_is_memory_that_torch_has_a_handle_for(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a system shares no memory of its GPU, too: seen is what torch's own reduction is given."""
    params = parameters(shapes=((1 << 20,), (333, 7)))
    opt = PagedAdamW(params, **options)
    steps(params, opt, 2)
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (sent.append(tensor), (int, ()))[1])
    state = [value for p in params for value in opt.state[p].values() if value.is_cuda]
    for value in state:
        ForkingPickler.dumps(value)
    torch_own = {block["address"] for s in torch.cuda.memory_snapshot() for block in s["blocks"]}
    assert all(torch.equal(a, b) for a, b in zip(sent, state, strict=True))
    assert {t.untyped_storage().data_ptr() for t in sent} <= torch_own
    assert not any(a is b for a, b in zip(sent, state, strict=True))
