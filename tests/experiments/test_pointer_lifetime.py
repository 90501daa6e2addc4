"""Lists that outlive what they name: what becomes of each hazard, who owns a copy, and what is a leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments.harness.rows import Rows
from experiments.lifetime import hazards, leaks, owners
from experiments.works import held_lists, mishaps
from experiments.works.held_lists import BARE, OURS, TORCH, User
from experiments.works.mishaps import CRASH, FOLLOWED, HARMS, KEPT, REFUSED, WRONG

# --- hazards


@pytest.mark.parametrize(
    ("hazard", "way", "outcome"),
    [
        ("deleted", TORCH, KEPT),
        ("deleted", OURS, KEPT),
        ("moved (p.data = …)", OURS, FOLLOWED),
        ("storage swapped (set_)", TORCH, FOLLOWED),
        ("gradients made anew", OURS, FOLLOWED),
        ("shrunk (resize_(0))", OURS, REFUSED),
    ],
)
def test_who_holds_tensors_can_be_played_in_this_process(hazard: str, way: str, outcome: str) -> None:
    (row,) = mishaps.played(hazard, way, "cpu")
    assert (row["outcome"], row["elements"]) == (outcome, 0)
    assert bool(row["said"]) is (outcome == REFUSED)
    assert "parameter 1" in row["said"] or outcome != REFUSED


def stale(user: User) -> Any:
    """A planted fault: a way that updates what the parameters were."""
    old = [p.detach() for p in user.params]
    grads = [p.grad for p in user.params]
    return lambda: torch._foreach_sub_(old, grads)


def test_a_way_that_follows_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(held_lists.WAYS, "stale", stale)
    (row,) = mishaps.played("moved (p.data = …)", "stale", "cpu")
    assert (row["outcome"], row["elements"]) == (WRONG, mishaps.SMALL)
    (row,) = mishaps.played("gradients made anew", "stale", "cpu")
    assert (row["outcome"], row["elements"]) == (WRONG, 4 * mishaps.SMALL)


def test_numbers_of_others_that_change_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    real = mishaps.others
    monkeypatch.setattr(mishaps, "others", lambda device: kept.extend(real(device)) or kept)
    monkeypatch.setitem(held_lists.WAYS, "rude", lambda user: lambda: kept[3][:5].sub_(1))
    (row,) = mishaps.played("deleted", "rude", "cpu")
    assert (row["outcome"], row["elements"]) == (HARMS, 5)


def test_a_process_that_dies_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    row = hazards.in_child("deleted and given back", BARE, "cpu")
    assert row["outcome"] == CRASH
    assert row["said"].startswith("ended with -11")


REPORT = (
    "========= Invalid __global__ write of size 4 bytes\n=========     at listed\n========= ERROR SUMMARY: {} error{}\n"
)


def test_a_report_of_memcheck_is_read() -> None:
    assert hazards.judged(REPORT.format(3, "s"))["outcome"] == hazards.NAMED
    ended = "{'outcome': 'followed'}\n========= ERROR SUMMARY: 0 errors"
    assert hazards.judged(ended)["outcome"] == hazards.NOTHING
    assert hazards.judged(REPORT.format(1, ""))["said"] == "Invalid __global__ write of size 4 bytes"
    for text in ("killed", "Device not supported\n========= ERROR SUMMARY: 0 errors"):
        with pytest.raises(RuntimeError, match="memcheck has checked nothing: "):
            hazards.judged(text)


# --- owners, leaks, price


@pytest.mark.parametrize("how", owners.HOW)
def test_bare_addresses_are_the_originals_and_deep_copies_of_ours_are_not(how: str) -> None:
    rows = Rows(owners.used("cpu"))
    assert rows.first(holder=BARE, how=how)["updates"] == owners.ORIGINAL  # type: ignore[index]
    for holder in ("DeviceTable", "Sweep", "PagedSGD"):
        wanted = owners.ORIGINAL if how == "copy" else owners.OWN
        assert rows.first(holder=holder, how=how)["updates"] == wanted  # type: ignore[index]


def test_what_is_kept_by_somebody_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    hoard: list[Any] = []
    monkeypatch.setitem(leaks.KINDS, "hoarded", lambda user: hoard.append(torch.ones(1 << 20)))
    (row,) = leaks.left({"hoarded": 10}, "cpu")
    assert row["ram"] > 8 * 4 << 20
