"""Lists and what they name on a GPU: hazards in processes of their own, copies of every way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support import launching
from ladder_rows import quick_run

from experiments.copies import kinds, peer, size
from experiments.copies.kinds import DEVICE, MANAGED, PINNED, REGISTERED
from experiments.lab import Rows, Run
from experiments.lifetime import hazards
from experiments.lifetime.hazards import BARE, CRASH, FOLLOWED, HARMS, KEPT, OURS, OURS_GRAPH, REFUSED, TORCH_GRAPH
from experiments.works import list_copy

pytestmark = launching()


def run_on_a_gpu() -> Run:
    run = quick_run()
    run.device = torch.device("cuda", 0)
    return run


@pytest.mark.parametrize(
    ("hazard", "way", "outcome"),
    [
        ("deleted", BARE, HARMS),
        ("deleted", TORCH_GRAPH, HARMS),
        ("deleted", OURS_GRAPH, KEPT),
        ("deleted and given back", BARE, CRASH),
        ("moved (p.data = …)", OURS, FOLLOWED),
        ("moved (p.data = …)", OURS_GRAPH, REFUSED),
        ("shrunk (resize_(0))", OURS, REFUSED),
        ("deleted, its step on another stream", BARE, HARMS),
        ("deleted, its step on another stream", OURS, KEPT),
    ],
)
def test_what_becomes_of_a_hazard(hazard: str, way: str, outcome: str) -> None:
    row = hazards.in_child(hazard, way, "cuda:0")
    assert row["outcome"] == outcome, row


def test_copies_of_bare_addresses_are_the_originals() -> None:
    rows = Rows(hazards.used("cuda:0"))
    assert {row["updates"] for row in rows.where(holder=BARE)} == {hazards.ORIGINAL}
    assert hazards.ORIGINAL not in {row["updates"] for row in rows.where(holder="PagedSGD", how="deepcopy")}


@pytest.mark.parametrize("make", [list_copy.one_by_one, list_copy.in_torch, list_copy.over_a_list])
def test_every_way_copies_every_byte(make: Any) -> None:
    """Of one large tensor, of tiny ones, and of sizes that loads of 16 bytes do not divide."""
    for sources in ([torch.rand(100_003, device="cuda")], list(torch.rand(300, 8, device="cuda")[:, :6].unbind())):
        targets = [torch.empty_like(t) for t in sources]
        list_copy.checked(make(sources, targets), sources, targets)


def test_a_large_copy_is_whole() -> None:
    for way in (size.by_call, size.by_list, size.by_torch):
        assert size.copied(way, (1 << 26) + 3, torch.device("cuda"), torch.device("cuda")) == (True, True)


@pytest.mark.parametrize("kind", [PINNED, REGISTERED, MANAGED])
def test_both_sides_have_one_number(kind: str) -> None:
    row = kinds.addressed(kind)
    assert (row["same"], row["seen"]) == (True, True)
    assert (row["cpu_reads"], row["gpu_reads"]) == (kinds.RIGHT, kinds.RIGHT)


def test_the_cpu_may_not_follow_an_address_of_the_device() -> None:
    row = kinds.addressed(DEVICE)
    assert (row["cpu_reads"], row["gpu_reads"]) == (kinds.MAY_NOT, kinds.RIGHT)


def test_a_copy_without_a_direction_is_right() -> None:
    rows = Rows(kinds.every_pair(kinds.NONE, "none"))
    wrong = [row for row in rows if row["outcome"] != kinds.RIGHT and "range" not in row["source"] + row["target"]]
    assert wrong == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_list_names_tensors_of_two_gpus() -> None:
    run = run_on_a_gpu()
    rows = Rows(peer.measure(run))
    assert run.left_out == []
    assert {row["case"] for row in rows.where(what="copy")} == {
        peer.OFF, peer.HOST, peer.API, peer.TORCH, peer.PUSH, peer.PULL, peer.MIXED,
    }  # fmt: skip
