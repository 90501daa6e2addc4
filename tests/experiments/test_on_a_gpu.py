"""Questions of experiments, on a GPU: hazards in processes of their own, copies of every way, and what is weighed."""

from __future__ import annotations

import pytest
import torch
from experiment_runs import quick_run
from gpu_support import launching

from experiments.copies import peer
from experiments.lab import Rows, Run
from experiments.lifetime import hazards
from experiments.lifetime.hazards import BARE, CRASH, FOLLOWED, HARMS, KEPT, OURS, OURS_GRAPH, REFUSED, TORCH_GRAPH
from experiments.vertical import spill
from experiments.vertical.spill import registers
from experiments.works.weight import Scales, extra

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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_list_names_tensors_of_two_gpus() -> None:
    run = run_on_a_gpu()
    rows = Rows(peer.measure(run))
    assert run.left_out == []
    assert {row["case"] for row in rows.where(what="copy")} == {
        peer.OFF, peer.HOST, peer.API, peer.TORCH, peer.PUSH, peer.PULL, peer.MIXED,
    }  # fmt: skip


# --- vertical fusion on a GPU: every way gives eager's numbers, and kernels of the questions are right ----------------


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize(("width", "threads"), [(8, 256), (128, 1024), (320, 1024)])
def test_fused_and_two_passes_divide_by_the_same_sum(width: int, threads: int, device: torch.device) -> None:
    x, y = (torch.rand(width * 3000, device=device) for _ in "xy")
    columns = x.view(width, -1).double()
    for case in spill.calls(x, y, width, threads):
        y.zero_()
        case.run()
        torch.testing.assert_close(y.view(width, -1).double(), columns / columns.sum(0), rtol=1e-5, atol=0)
    for _ in range(2):  # the second time NVRTC's own cache could answer, which says nothing
        said = registers(spill.TEXT, "fused", "sm_90", *spill.defines(width, threads))
        assert (said["spill_stores"] > 0) is (width > 64)


# --- experiments weigh what was asked of torch's allocator ------------------------------------------------------------


def test_a_number_is_four_bytes_though_its_block_takes_more() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.ones(1, device=device)
    scales = Scales(device)
    kept = torch.ones(1, device=device)
    assert scales.since()["taken"] == 4
    del kept
    assert scales.since()["taken"] == 0


def test_the_peak_of_a_step_is_what_it_asked_for_at_once() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert extra(lambda: torch.ones(1000, device=device).exp(), device) == 8000
    assert extra(lambda: torch.ones(1000, device=device), device) == 4000
