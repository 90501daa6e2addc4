"""Training over several processes of one machine beside torch's fused AdamW, saved, and continued by new processes.

On CPUs over gloo; where there are two GPUs, over NCCL as well.  Several machines have not been tried.

Each of torch's ways trains a small model three times from the same seed: with torch's class, with ours and all state on
the device, and with ours and all state away (``device_budget=0``).  What each process has of losses, parameters and
state agrees with torch's, and is bit for bit the same wherever state lies and after resuming in new processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from children import python
from paths import ROOT
from processes import on_devices, together

#: How far losses and weights may be from those of torch's fused kernel, a rounding or two; that for CUDA takes 1 - beta
#: in float32.  Where forward and backward are in bfloat16, a last bit of a weight can be one of those.
BOUND, IN_BFLOAT16 = {"cpu": 1e-6, "cuda": 1e-5}, 1e-2


#: Whose functions new processes call.
RUNS = "tests.clients.several_runs"

pytestmark = pytest.mark.clients


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The last losses, parameters and state of this process, bit for bit."""
    check_close(one, other, 0.0)


def check_close(one: dict[str, Any], other: dict[str, Any], bound: float) -> None:
    """The same within ``bound``, relative and absolute."""
    count = min(len(one["losses"]), len(other["losses"]))
    assert one["losses"][-count:] == pytest.approx(other["losses"][-count:], rel=bound, abs=bound)
    assert one["values"].keys() == other["values"].keys()
    for name, value in one["values"].items():
        there = other["values"][name]
        close = value.shape == there.shape and torch.allclose(value, there, rtol=bound, atol=bound)
        assert close, f"{name}: {(value - there).abs().max()}"


def check_places(found: dict[str, Any]) -> None:
    """What is to be away, is."""
    assert not any(place.get("file", 0) for place in found["ours"]["places"])
    assert not any(place.get("device", 0) for place in found["away"]["places"])


def check_setup(name: str, device: str, folder: Path, world: int = 2, bound: float | None = None) -> None:
    """Train and save, go on in new processes; ``name`` is that of a setup in ``several_setups.py``."""
    bound = bound or BOUND[device]
    before = together(f"{RUNS}.trained", world, device, name, folder)
    for found in before:
        check_close(found["ours"], found["torch"], bound)
        check_same(found["away"], found["ours"])
        assert found["ours"]["kinds"] == found["torch"]["kinds"]
        check_places(found)
    for found, old in zip(together(f"{RUNS}.trained", world, device, name, folder, True), before, strict=True):
        check_close(found["torch"], old["torch"], bound)
        check_same(found["ours"], old["ours"])
        check_same(found["away"], old["ours"])
        assert found["ours"]["kinds"] == old["ours"]["kinds"]
        assert found["ours"]["steps"] == old["ours"]["steps"]
        check_places(found)


@on_devices(2)
def test_ddp(device: str, tmp_path: Path) -> None:
    """`DistributedDataParallel`: accumulation under `no_sync`, clipping."""
    check_setup("DDP", device, tmp_path)


@on_devices(2)
def test_zero(device: str, tmp_path: Path) -> None:
    """`ZeroRedundancyOptimizer`: what its `load_state_dict` puts elsewhere is used there. `set_device_budget()` of its
    `.optim` moves it back; step counts return to the device with the next step, where `fused` or `capturable` asks.
    """
    check_setup("ZeroRedundancyOptimizer", device, tmp_path)


@on_devices(2)
def test_in_backward(device: str, tmp_path: Path) -> None:
    """`torch.distributed.optim._apply_optimizer_in_backward`: an optimizer per parameter; on GPUs under DDP, which does
    that on no CPU."""
    check_setup("_apply_optimizer_in_backward", device, tmp_path)


@on_devices(2)
def test_fsdp1(device: str, tmp_path: Path) -> None:
    """FSDP1 with `use_orig_params=True`: accumulation under `no_sync`, its `clip_grad_norm_`, empty parameters; on GPUs
    its `optim_state_dict`, which on CPUs gives wrong state for any optimizer (torch 2.13)."""
    check_setup("FSDP1", device, tmp_path)


@on_devices(2, often=False)  # often it is part of what another number of processes loads
def test_fsdp2(device: str, tmp_path: Path) -> None:
    """FSDP2, `fully_shard`: uneven and empty shards, accumulation, clipping, `torch.distributed.checkpoint`."""
    check_setup("FSDP2", device, tmp_path)


@on_devices(2)
def test_fsdp2_in_bfloat16(device: str, tmp_path: Path) -> None:
    """FSDP2 with `MixedPrecisionPolicy`: forward and backward in bfloat16, gradients summed in float32."""
    check_setup("FSDP2 in bfloat16", device, tmp_path, bound=IN_BFLOAT16)


@on_devices(2)
def test_fsdp2_offloaded(device: str, tmp_path: Path) -> None:
    """FSDP2 with `CPUOffloadPolicy`."""
    check_setup("FSDP2, offloaded", device, tmp_path)


@on_devices(4)
def test_fsdp2_of_replicas(device: str, tmp_path: Path) -> None:
    """FSDP2 over a mesh of two dimensions: replicas of shards, four processes."""
    check_setup("FSDP2, replicas of shards", device, tmp_path, world=4)


@on_devices(2, often=False)  # often it is under FSDP2, and where one process prepares its step anew
def test_tensor_parallel(device: str, tmp_path: Path) -> None:
    """Tensor parallel, `parallelize_module`: by columns, by rows, and by sequence (partial gradients)."""
    check_setup("tensor parallel", device, tmp_path)


@on_devices(4)
def test_fsdp2_over_tensor_parallel(device: str, tmp_path: Path) -> None:
    """FSDP2 over tensor parallel, four processes."""
    check_setup("FSDP2 over tensor parallel", device, tmp_path, world=4)


@on_devices(2)
def test_a_checkpoint_is_loaded_by_another_number_of_processes(device: str, tmp_path: Path) -> None:
    """A checkpoint of FSDP2 is loaded by another number of processes: 2, 3 and 1 (on two GPUs: 2, 1 and 2)."""
    before: dict[str, Any] = {}
    for stage, world in enumerate((2, 3, 1) if device == "cpu" else (2, 1, 2)):
        found = together(f"{RUNS}.resharded", world, device, "FSDP2", tmp_path, 2 * stage, 2 * stage + 2)
        for each in found:
            for who in before:
                check_same({"losses": [], "values": each[who]["begun"]}, {**before[who], "losses": []})
            check_close(each["ours"], each["torch"], BOUND[device])
            check_same(each["away"], each["ours"])
            check_places(each)
        before = found[0]


@on_devices(2)
def test_one_process_prepares_its_step_anew(device: str) -> None:
    """One process has replaced its state and the others have not: none waits for the others."""
    for found in together(f"{RUNS}.one_of_them_prepares_anew", 2, device):
        check_close(found["ours"], found["torch"], BOUND[device])
        check_same(found["away"], found["ours"])


@on_devices(2)
def test_copies_and_estimates(device: str) -> None:
    """FSDP2: `copy.deepcopy` and `pickle` of an optimizer go on alike; `estimate` says what a process will take."""
    for rank, found in enumerate(together(f"{RUNS}.copied", 2, device)):
        copied, pickled, original = found["after"]
        assert all(map(torch.equal, copied, original))
        assert all(map(torch.equal, pickled, original))
        taken, planned, rows = found["bytes"]
        assert (rows, taken) == ((4, 3)[rank], planned)


@pytest.mark.parametrize("whole", [True, False], ids=["DDP", "its module"])
@pytest.mark.parametrize("name", ["DDP", "DDP, gradients in buckets"])
def test_ddp_attached(name: str, whole: bool) -> None:
    """`attach` under DDP, also with `gradient_as_bucket_view=True`, to the model or to its module."""
    for found in together(f"{RUNS}.attached", 2, "cpu", name, whole):
        check_same(found["attached"], found["plain"])
        hidden, plain = found["attached"]["report"]
        assert hidden > 0
        assert not plain


def test_fsdp_is_not_attached() -> None:
    """`attach` refuses models of FSDP1 and FSDP2."""
    (said,) = together(f"{RUNS}.refuse_to_attach", 1, "cpu")
    assert ["FullyShardedDataParallel" in said[0], "FSDPModule" in said[1]] == [True, True]


def example(*arguments: str) -> dict[str, str]:
    """What ``examples/fsdp2.py`` says, line by line."""
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/fsdp2.py", *arguments)
    said = python(*command, timeout=110, cwd=ROOT, PYTHONPATH=str(ROOT))
    return dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)


def test_the_example_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """`torchrun`: the example's second run continues where the first one ended."""
    for run in range(2):
        said = example("--folder", str(tmp_path / "checkpoint"), "--steps", "2")
        assert [name for name in said if name.startswith("step")] == [f"step {2 * run + i}" for i in range(2)]
        assert "optimizer state" in said["of this process"]
