"""PagedAdamW on a GPU: on the current stream, without waiting, and in managed memory.

That its numbers are torch's is in ``tests/optim/test_places.py`` and ``test_acts.py``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from children import python
from gpu_support import NEEDED, no_synchronizing
from optim_support import ADAMW, model, step_on_ones, train
from spill_support import same
from stand_ins import raising

from pagedopt import PagedAdamW
from pagedopt.system import driver

pytestmark = NEEDED


def trained(count: int, **options: Any) -> tuple[torch.nn.Module, PagedAdamW]:
    """A model and its optimizer after ``count`` steps."""
    net = model("cuda")
    opt = PagedAdamW(net.parameters(), **options)
    train(net, opt, count)
    return net, opt


def test_managed_state_is_managed_and_survives_the_optimizer() -> None:
    net, opt = trained(2, placement="managed")
    report = opt.memory_report()
    assert (report.placement, set(report.by_place)) == ("managed", {"device"})
    state = opt.state[next(net.parameters())]["exp_avg"]
    d = driver.bindings()
    kind = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
    assert driver.check("cuPointerGetAttribute", d.cuPointerGetAttribute(kind, state.data_ptr()))
    expected = state.clone()
    del opt
    torch.cuda.synchronize()
    assert torch.equal(state, expected)


def test_managed_memory_beyond_its_share_is_refused_and_the_optimizer_stays_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = model("cuda")
    opt = PagedAdamW(net.parameters(), placement="managed")
    monkeypatch.setattr(driver, "MANAGED_SHARE", 1e-12)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(MemoryError, match="bytes of managed memory asked for on cuda:0"):
        train(net, opt, 1)
    assert not opt.state
    assert same(before, list(net.parameters()))
    monkeypatch.undo()
    train(net, opt, 1)


@pytest.mark.parametrize("refusal", ["attribute", "allocator"])
def test_state_falls_back_to_the_device_with_one_warning(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedopt.system import warn

    warn._said.clear()
    if refusal == "attribute":
        monkeypatch.setattr(driver, "capabilities", lambda _: driver.Capabilities(True, False, True))
    else:
        refused = driver.CudaError("cuMemAllocManaged", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported")
        monkeypatch.setattr(driver, "allocate_managed", raising(refused))
    calls: list[str] = []
    for name in ("advise", "prefetch"):
        monkeypatch.setattr(driver, name, lambda *_, name=name: calls.append(name))
    net, other = model("cuda"), model("cuda")
    opt, plain = PagedAdamW(net.parameters(), placement="managed", transport="memcpy"), PagedAdamW(other.parameters())
    with pytest.warns(RuntimeWarning, match="placement='managed'") as caught:
        train(net, opt, 3)
    assert len([w for w in caught if "placement" in str(w.message)]) == 1
    assert not calls
    monkeypatch.undo()
    train(other, plain, 3)
    assert opt.memory_report().by_place.keys() == {"device"}
    assert same(list(net.parameters()), list(other.parameters()))


def test_step_does_not_synchronize_nor_allocate() -> None:
    net, opt = trained(6)  # more steps than the ring of tables has places
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronizing():
        for _ in range(3):
            opt.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_step_runs_on_the_current_stream() -> None:
    """Gradients are written late on a side stream; a step on any other stream would use the old ones."""
    results = []
    for delayed in (False, True):
        p = torch.nn.Parameter(torch.ones(100_000, device="cuda"))
        p.grad = torch.full_like(p, 7.0)
        opt = PagedAdamW([p], **ADAMW)
        opt.step()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            if delayed:
                torch.cuda._sleep(50_000_000)
            p.grad.copy_(torch.linspace(-1, 1, 100_000, device="cuda"))
            opt.step()
        torch.cuda.synchronize()
        results.append(p.detach().clone())
    assert torch.equal(*results)


def test_steps_that_run_ahead_of_the_gpu_keep_their_own_scalars() -> None:
    """Twenty steps behind a delay: each table holds its step's bias corrections until the launch has read them."""
    results = []
    for delayed in (False, True):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 5000, device="cuda"))
        p.grad = torch.ones_like(p)
        opt = PagedAdamW([p], **ADAMW)
        opt.step()
        for step in range(20):
            if delayed:
                torch.cuda._sleep(5_000_000)
            opt.param_groups[0]["lr"] = 0.01 * (step + 1)
            opt.step()
            if not delayed:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        results.append(p.detach().clone())
    assert torch.equal(*results)


def test_capture_is_refused_in_words() -> None:
    net, opt = trained(1)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="param_groups' capturable is False"), torch.cuda.graph(graph):
        opt.step()
    train(net, opt, 1)


def test_a_new_process_continues_to_the_same_bits(tmp_path: Path) -> None:
    net, opt = trained(5, **ADAMW)
    torch.save({"model": net.state_dict(), "opt": opt.state_dict()}, tmp_path / "half.pt")
    train(net, opt, 5, first=5)
    script = """
import sys, torch
from optim_support import ADAMW, model, train
from pagedopt import PagedAdamW
net = model("cuda")
opt = PagedAdamW(net.parameters(), **ADAMW)
half = torch.load(sys.argv[1] + "/half.pt", map_location={"none": None}.get(sys.argv[2], sys.argv[2]))
net.load_state_dict(half["model"]); opt.load_state_dict(half["opt"])
train(net, opt, 5, first=5)
torch.save([p.detach().cpu() for p in net.parameters()], sys.argv[1] + "/end.pt")
"""
    for where in ("none", "cpu", "cuda"):
        python("-c", script, tmp_path, where, timeout=120)
        assert same([p.cpu() for p in net.parameters()], torch.load(tmp_path / "end.pt")), where


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_of_another_device_than_the_current_one() -> None:
    params = [torch.nn.Parameter(torch.ones(1000, device=f"cuda:{i}")) for i in (1, 0, 1)]
    opt = PagedAdamW(params, lr=0.5, weight_decay=0.0)
    step_on_ones(opt)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert all(torch.allclose(p, torch.full_like(p, 0.5)) for p in params)
