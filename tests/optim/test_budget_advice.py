"""What an optimizer says of its bytes: the note beside an out-of-memory error, and the log."""

from __future__ import annotations

import logging
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from optim_support import step_on_ones

from pagedopt import PagedAdamW, PagedSGD
from pagedopt.common.units import parse_bytes
from pagedopt.placements import FileArena
from pagedopt.system import warn

MIB = 1 << 20


def stepped(kind: Any = PagedAdamW, **options: Any) -> Any:
    """An optimizer with 48 MiB of state after its first step (of SGD with momentum half of that)."""
    optimizer = kind([torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(6)], **options)
    step_on_ones(optimizer)
    return optimizer


def noted(optimizer: Any, error: type[BaseException] = torch.OutOfMemoryError) -> str:
    with pytest.raises(error) as caught, optimizer.guard():
        raise error("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert str(caught.value).startswith("CUDA out of memory")
    (note,) = caught.value.__notes__
    return str(note)


def test_the_note_says_what_happens_then() -> None:
    """By the optimizer itself, which does what the note says."""
    optimizer = stepped(device_budget="75%")
    here = optimizer.memory_report().by_place["host"]
    found = re.fullmatch(
        r"state holds (.*) here; device_budget='(.*)' frees (.*) and costs about (.*) ms a step "
        r"\(rates of a round guess, assumed: `pagedopt doctor` measures\): set_device_budget\('(.*)'\)",
        noted(optimizer),
    )
    assert found
    holds, budget, frees, ms, same = found.groups()
    assert parse_bytes(holds) == pytest.approx(here, rel=0.01)
    assert budget == same
    optimizer.set_device_budget(budget)
    left = optimizer.memory_report().by_place["host"]
    assert parse_bytes(frees) == pytest.approx(here - left, rel=0.01)
    away = optimizer.memory_report().by_place["file"]
    # By 2 GB/s read and 1 GB/s written; 28 bytes for each 8 of state pass no more through RAM of 20 GB/s.
    assert float(ms) == pytest.approx(1e3 * away * (1 / 2e9 + 1 / 1e9 - 28 / 8 / 20e9), rel=0.01)


def test_without_state_or_a_budget_it_says_when() -> None:
    params = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(6)]
    fresh = noted(PagedAdamW(params))
    assert fresh.startswith("state will hold 48.0 MiB here; device_budget='24MiB' frees 24.0 MiB")
    assert "(rates of a round guess, assumed: `pagedopt doctor` measures)" in fresh
    assert fresh.endswith(", when the optimizer is made")
    assert noted(stepped()).startswith("state holds 48.0 MiB here; device_budget='24MiB' frees 24.0 MiB")
    assert noted(stepped(PagedSGD)) == "the optimizer's state will hold 0 B here: it is not what fills the memory"
    assert "holds 0 B here" in noted(stepped(device_budget=0))


def test_real_errors_and_others() -> None:
    optimizer = stepped()
    with pytest.raises(MemoryError) as full, optimizer.guard():
        np.empty(1 << 50)
    assert "state holds 48.0 MiB" in full.value.__notes__[0]
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as plain, optimizer.guard():
        torch.empty(1 << 50)
    assert type(plain.value) is RuntimeError
    assert "state holds 48.0 MiB" in plain.value.__notes__[0]
    for other in (ValueError, RuntimeError):
        with pytest.raises(other, match="not of memory") as caught, optimizer.guard():
            raise other("not of memory")
        assert not hasattr(caught.value, "__notes__")
    with optimizer.guard():
        pass


def test_whatever_goes_wrong_with_the_note_the_error_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = stepped()
    monkeypatch.setattr(optimizer, "rule_of", lambda group: 1 // 0)
    with pytest.raises(torch.OutOfMemoryError) as caught, optimizer.guard():
        raise torch.OutOfMemoryError("first")
    assert not hasattr(caught.value, "__notes__")


# ---- the log ----


def test_making_and_moving_state_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagedopt"):
        optimizer = stepped(device_budget="75%")
        optimizer.set_device_budget("25%")
        optimizer.spill()
        optimizer.unspill()
        optimizer.set_device_budget("all")
    made, *moves = caplog.messages
    assert re.fullmatch(
        r"PagedAdamW: state made \(device_budget 75%\): 36.0 MiB on host, 12.0 MiB on file \(file\); a step now moves "
        r"24.0 MiB to and from the file, about 16.7 ms \(rates of a round guess, assumed: `pagedopt doctor` measures\)",
        made,
    )
    whys = ["set_device_budget('25%')", "spill()", "unspill()", "set_device_budget('all')"]
    for said, why in zip(moves, whys, strict=True):
        moved = re.match(rf"PagedAdamW: (\S+ MiB) moved \({re.escape(why)}\), waited \S+ [mµ]?s: ", said)
        assert moved, said
        assert 4 * MIB <= parse_bytes(moved[1]) <= 48 * MIB
    assert "a step moves nothing" in moves[-1]


def test_plain_state_is_told_in_the_words_of_the_report(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagedopt"):
        stepped()
    assert caplog.messages == [
        "PagedAdamW: state made (device_budget all): 48.0 MiB on host (ordinary memory); a step moves nothing"
    ]


@pytest.mark.parametrize("budget", [None, "50%"])
def test_state_of_a_checkpoint_is_told_where_it_is_made(budget: Any, caplog: pytest.LogCaptureFixture) -> None:
    saved = stepped().state_dict()
    fresh = PagedAdamW([torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(6)], device_budget=budget)
    with caplog.at_level(logging.INFO, "pagedopt"):
        fresh.load_state_dict(saved)
        fresh.load_state_dict(saved)  # into the same memory
    (said,) = caplog.messages
    where = "48.0 MiB on host (ordinary memory)" if budget is None else "24.0 MiB on host, 24.0 MiB on file (file)"
    head = f"PagedAdamW: state made by load_state_dict() (device_budget {budget or 'all'})"
    assert said.startswith(f"{head}: {where}; a step")


def test_falling_back_warns_in_the_log_too(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_said", set())
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "pagedopt"):
        warnings.simplefilter("ignore")
        stepped(placement="mapped", device_budget="50%")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "placement='mapped' on cpu: these parameters are on no GPU. State is kept in" in record.getMessage()


def test_steps_say_nothing_and_nobody_need_listen(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    optimizer = stepped(device_budget="50%")
    with caplog.at_level(logging.DEBUG, "pagedopt"):
        for _ in range(3):
            optimizer.step()
    assert not caplog.records
    optimizer.set_device_budget(0)
    assert capfd.readouterr().err == ""


def test_a_failed_move_says_where_bytes_are(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = stepped(device_budget="all", placement="file")
    move = FileArena.move

    def halfway(arena: FileArena, resident: int) -> None:
        move(arena, resident + 2)
        raise OSError("the disk is full")

    monkeypatch.setattr(FileArena, "move", halfway)
    with caplog.at_level(logging.INFO, "pagedopt"), pytest.raises(OSError, match="full"):
        optimizer.set_device_budget(0)
    (said,) = caplog.messages
    assert "moved (set_device_budget(0))" in said
    assert f"{optimizer.memory_report().by_place['file'] / MIB:.1f} MiB on file" in said
