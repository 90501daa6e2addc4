"""Training over several processes beside torch's fused AdamW, saved, and continued by new processes.

On CPUs over gloo; where there are two GPUs, over NCCL as well: ``pytest tests/distributed -m ""``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from processes import places, together

#: By name of a setup in ``tests/helpers/several_setups.py``: processes.
SETUPS = {
    "DDP": 2,
    "ZeroRedundancyOptimizer": 2,
    "_apply_optimizer_in_backward": 2,
    "FSDP1": 2,
    "FSDP2": 2,
    "FSDP2 in bfloat16": 2,
    "FSDP2, offloaded": 2,
    "FSDP2, replicas of shards": 4,
    "tensor parallel": 2,
    "FSDP2 over tensor parallel": 4,
}
#: Those that `make test` runs, too.
LIGHT = ("FSDP2",)
#: How far losses and weights may be from those of torch's fused kernel, a rounding or two; that for CUDA takes 1 - beta
#: in float32.  Where forward and backward are in bfloat16, a last bit of a weight can be one of those.
BOUND, IN_BFLOAT16 = {"cpu": 1e-6, "cuda": 1e-5}, 1e-2
CASES = [
    pytest.param(name, device, id=f"{name}-{device}", marks=[*marks, *([] if name in LIGHT else [pytest.mark.clients])])
    for name, world in SETUPS.items()
    for device, marks in places(world).items()
]


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The last losses, parameters and state of this process, bit for bit."""
    count = min(len(one["losses"]), len(other["losses"]))
    assert one["losses"][-count:] == other["losses"][-count:]
    assert one["values"].keys() == other["values"].keys()
    assert [name for name, value in one["values"].items() if not torch.equal(value, other["values"][name])] == []


def check_close(one: dict[str, Any], other: dict[str, Any], bound: float) -> None:
    """The same within ``bound``, relative and absolute."""
    count = min(len(one["losses"]), len(other["losses"]))
    assert one["losses"][-count:] == pytest.approx(other["losses"][-count:], rel=bound, abs=bound)
    assert one["values"].keys() == other["values"].keys()
    for name, value in one["values"].items():
        there = other["values"][name]
        assert torch.allclose(value, there, rtol=bound, atol=bound), f"{name}: {(value - there).abs().max()}"


def check_places(found: dict[str, Any]) -> None:
    """What is to be away, is."""
    assert not any(place.get("file", 0) for place in found["ours"]["places"])
    for place in found["away"]["places"]:
        assert place.get("device", 0) == 0


@pytest.mark.parametrize(("name", "device"), CASES)
def test_it_trains_as_torch_s_class_and_goes_on_in_new_processes(name: str, device: str, tmp_path: Path) -> None:
    world, bound = SETUPS[name], IN_BFLOAT16 if "bfloat16" in name else BOUND[device]
    before = together("several_runs.trained", world, device, name, tmp_path)
    for found in before:
        check_close(found["ours"], found["torch"], bound)
        check_same(found["away"], found["ours"])
        assert found["ours"]["kinds"] == found["torch"]["kinds"]
        check_places(found)
    for found, old in zip(together("several_runs.resumed", world, device, name, tmp_path), before, strict=True):
        check_close(found["torch"], old["torch"], bound)
        check_same(found["ours"], old["ours"])
        check_same(found["away"], old["ours"])
        assert found["ours"]["kinds"] == old["ours"]["kinds"]
        assert found["ours"]["steps"] == old["ours"]["steps"]
        check_places(found)


@pytest.mark.clients
@pytest.mark.parametrize(
    ("device", "worlds"),
    [
        pytest.param("cpu", (2, 3, 1), id="cpu"),
        pytest.param("cuda", (2, 1, 2), id="cuda", marks=places(2)["cuda"]),
    ],
)
@pytest.mark.parametrize("name", ["FSDP2"])
def test_a_checkpoint_of_several_processes_is_loaded_by_another_number_of_them(
    name: str, device: str, worlds: tuple[int, ...], tmp_path: Path
) -> None:
    before: dict[str, Any] = {}
    for stage, world in enumerate(worlds):
        found = together("several_runs.resharded", world, device, name, tmp_path, 2 * stage, 2 * stage + 2)
        for each in found:
            for who in ("torch", "ours", "away"):
                if before:
                    check_same({"losses": [], "values": each[who]["begun"]}, {**before[who], "losses": []})
            check_close(each["ours"], each["torch"], BOUND[device])
            check_same(each["away"], each["ours"])
            check_places(each)
        before = found[0]


BOTH = [pytest.param(device, id=device, marks=marks) for device, marks in places(2).items()]


@pytest.mark.clients
@pytest.mark.parametrize("device", BOTH)
def test_a_process_that_prepares_its_step_anew_does_not_leave_the_others_waiting(device: str) -> None:
    for found in together("several_runs.one_of_them_prepares_anew", 2, device):
        check_close(found["ours"], found["torch"], BOUND[device])
        check_same(found["away"], found["ours"])


@pytest.mark.clients
@pytest.mark.parametrize("device", BOTH)
def test_copies_go_on_alike_and_take_what_was_estimated(device: str) -> None:
    for rank, found in enumerate(together("several_runs.copied", 2, device)):
        copied, pickled, original = found["after"]
        assert all(map(torch.equal, copied, original))
        assert all(map(torch.equal, pickled, original))
        taken, planned, rows = found["bytes"]
        assert rows == (4, 3)[rank]
        assert taken == planned


def example(*arguments: str) -> dict[str, str]:
    """What ``examples/fsdp2.py`` says, line by line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "examples/fsdp2.py", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


@pytest.mark.clients
def test_the_example_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    assert len((ROOT / "examples" / "fsdp2.py").read_text().splitlines()) <= 60
    whole = example("--folder", str(tmp_path / "whole"), "--steps", "4")
    halves = [example("--folder", str(tmp_path / "halves"), "--steps", "2") for _ in range(2)]
    steps = {name: said for name, said in whole.items() if name.startswith("step")}
    assert list(steps) == [f"step {number}" for number in range(4)]
    assert {name: said for half in halves for name, said in half.items() if name in steps} == steps
    assert "optimizer state" in whole["of this process"]
