"""DTensors: their shards are updated, their state is placed as they are, and what cannot be is refused in words.

Here one process is a group of its own; ``tests/clients/test_several_processes.py`` has several.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optim_support import ADAMW, through_file

from pagedopt import PagedAdamW, PagedSGD, multi_tensor_apply
from pagedopt.foreach_ops import foreach_add
from pagedopt.rules import RULES
from pagedopt.tables.tensors import local
from tests.outside.format import Int8Blocks
from tests.specs import BY_STATE, Case


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def placed(mesh: Any, tensor: torch.Tensor, placement: str = "Shard") -> Any:
    from torch.distributed import tensor as tensors

    arguments = (0,) if placement == "Shard" else ()
    return tensors.DTensor.from_local(tensor, mesh, [getattr(tensors, placement)(*arguments)])


def parameters(mesh: Any) -> list[torch.nn.Parameter]:
    """One, two with other strides, none, gaps, a replica, complex ones, a plain one."""
    values = [
        torch.linspace(-1, 1, 1), torch.linspace(-1, 1, 12).view(3, 4).t(), torch.empty(0, 4),
        torch.linspace(-1, 1, 24).view(4, 6)[:, ::2], torch.linspace(1, 2, 5),
        torch.complex(torch.linspace(-1, 1, 3), torch.ones(3)),
    ]  # fmt: skip
    kinds = ["Shard"] * 4 + ["Replicate", "Shard"]
    sharded = [placed(mesh, value, kind) for value, kind in zip(values, kinds, strict=True)]
    return [torch.nn.Parameter(p) for p in (*sharded, torch.linspace(-1, 1, 7))]


def adds_complex(mesh: Any) -> bool:
    """Whether the group can make sums of complex numbers; that of an older torch's gloo raises."""
    try:
        placed(mesh, torch.ones(1, dtype=torch.complex64), "Partial").full_tensor()
    except RuntimeError:
        return False
    return True


def gradients(mesh: Any, params: list[torch.nn.Parameter], number: int, sums: bool = False) -> None:
    """``sums``: that are still to be made; of one process they are what it has."""
    from torch.distributed.tensor import DTensor

    for i, p in enumerate(params):
        shard = p.to_local() if isinstance(p, DTensor) else p
        values = torch.sin(torch.arange(shard.numel()) + number + i).to(shard.dtype).view(shard.shape)
        summed = sums and (not shard.is_complex() or adds_complex(mesh))
        kind = "Partial" if summed else "Replicate" if i == 4 else "Shard"
        p.grad = placed(mesh, values, kind) if isinstance(p, DTensor) else values


def step(mesh: Any, params: list[torch.nn.Parameter], optimizer: Any, number: int = 0, sums: bool = False) -> None:
    gradients(mesh, params, number, sums)
    optimizer.step()


def check_like(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert type(value) is type(other[name])
        if name != "step":
            assert getattr(value, "placements", None) == getattr(other[name], "placements", None)
        assert torch.allclose(local(value), local(other[name]), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*are in tensors outside of the pages:RuntimeWarning")
@pytest.mark.parametrize("case", BY_STATE.values(), ids=str)
@pytest.mark.parametrize("budget", [None, 0])
def test_shards_have_the_bits_of_plain_parameters_whatever_becomes_of_their_state(
    mesh: Any, case: Case, budget: Any
) -> None:
    """Budgets move it, users replace it, others load it."""
    shards = parameters(mesh)
    plain = [torch.nn.Parameter(local(p.detach()).clone(memory_format=torch.preserve_format)) for p in shards]
    optimizers = [case.make(False, [{"params": some}], device_budget=budget) for some in (shards, plain)]
    for number in range(6):
        gradients(mesh, shards, number, sums=number % 2 == 1)
        for p, q in zip(shards, plain, strict=True):
            q.grad = local(p.grad).clone()
        for some, optimizer in zip((shards, plain), optimizers, strict=True):
            if number == 2:
                for name in case.names:
                    if name in optimizer.state[some[0]]:
                        optimizer.state[some[0]][name] = optimizer.state[some[0]][name].clone()
            if number == 3 and budget is not None:
                optimizer.set_device_budget(None)
                assert optimizer.spill() > 0
            if number == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if number == 5:
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    for p, q in zip(shards, plain, strict=True):
        assert torch.equal(local(p.detach()), q)
        assert optimizers[0].state[p].keys() == optimizers[1].state[q].keys()
        for name, value in optimizers[0].state[p].items():
            assert value is None or torch.equal(local(value), optimizers[1].state[q][name])


def test_a_step_shows_in_version_counters(mesh: Any) -> None:
    (p,) = params = [torch.nn.Parameter(placed(mesh, torch.ones(3)))]
    before = p._version
    step(mesh, params, PagedAdamW(params))
    assert p._version > before


def test_state_goes_in_and_out_of_torchs_class_and_of_files(mesh: Any) -> None:
    ours, theirs = parameters(mesh), parameters(mesh)
    a, b = PagedAdamW(ours, **ADAMW, device_budget=0), torch.optim.AdamW(theirs, **ADAMW, foreach=False)
    for params, optimizer in ((ours, a), (theirs, b)):
        step(mesh, params, optimizer)
    before = {p: dict(entry) for p, entry in a.state.items()}
    a.load_state_dict(through_file(b.state_dict(), weights_only=False))
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for p, q in zip(ours, theirs, strict=True):
        check_like(a.state[p], b.state[q])
        kept = all(a.state[p][name] is before[p][name] for name in ("exp_avg", "exp_avg_sq"))
        assert kept or not p.numel(), "copied into what is there"


def test_state_of_offloaded_shards_stays_with_them(mesh: Any) -> None:
    """``CPUOffloadPolicy``: shards are on the CPU, the group's device is another."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    values = torch.linspace(-1, 1, 6)
    there = DeviceMesh("cuda", torch.tensor([0]), _init_backend=False)
    spec = DTensorSpec(there, (Shard(0),), tensor_meta=TensorMeta(values.shape, values.stride(), values.dtype))
    found = []
    for kind, options in ((PagedAdamW, {}), (PagedAdamW, {"device_budget": 0}), (torch.optim.AdamW, {})):
        p = torch.nn.Parameter(DTensor(values.clone(), spec, requires_grad=False))  # as FSDP2 makes them
        optimizer = kind([p], **ADAMW, **options)
        for _ in range(3):
            p.grad = DTensor(torch.cos(values), spec, requires_grad=False)
            optimizer.step()
        found.append({"param": p.detach(), **optimizer.state[p]})
        assert all(local(value).device.type == "cpu" for value in found[-1].values())
        optimizer.load_state_dict(optimizer.state_dict())
    check_like(found[0], found[2])
    check_like(found[1], found[2])


def test_state_in_bfloat16_is_placed_as_its_parameter(mesh: Any) -> None:
    params = parameters(mesh)[:5]
    optimizer = PagedAdamW(params, state_format="bfloat16")
    step(mesh, params, optimizer)
    assert optimizer.state[params[1]]["exp_avg"].dtype is torch.bfloat16
    assert optimizer.state[params[1]]["exp_avg"].placements == params[1].placements
    optimizer.set_device_budget(None)


def test_blocks_of_shards_are_refused(mesh: Any) -> None:
    whole, shard = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(placed(mesh, torch.ones(4)))
    with pytest.raises(ValueError, match="int8 in blocks of 64"):
        PagedAdamW([whole, shard], state_format=Int8Blocks())
    optimizer = PagedAdamW([whole], state_format={"exp_avg": Int8Blocks()})
    with pytest.raises(ValueError, match="int8 in blocks of 64"):
        optimizer.add_param_group({"params": [shard]})
    assert len(optimizer.param_groups) == 1


def test_codes_are_refused_where_only_one_of_state_and_parameter_is_a_shard(mesh: Any) -> None:
    p = torch.nn.Parameter(torch.ones(70, 90))
    optimizer = PagedAdamW([p], state_format="int8")
    plain = {"step": 1, "exp_avg": torch.ones(70, 90), "exp_avg_sq": torch.ones(70, 90)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: plain}})
    saved = optimizer.state_dict()
    sharded = PagedAdamW([torch.nn.Parameter(placed(mesh, torch.ones(70, 90)))])
    with pytest.raises(ValueError, match=r"has no exp_avg.*another state_format, whose decoded_state_dict"):
        sharded.load_state_dict(saved)
    entry = {key: placed(mesh, t, "Replicate") if t.dim() == 2 else t for key, t in saved["state"][0].items()}
    with pytest.raises(ValueError, match=r"loaded exp_avg.root3 of parameter 0 is a DTensor .* is no DTensor"):
        optimizer.load_state_dict({**saved, "state": {0: entry}})
    assert not optimizer.damaged


def test_a_parameter_of_sums_that_have_not_been_made_is_refused(mesh: Any) -> None:
    with pytest.raises(TypeError, match="Partial"):
        PagedAdamW([torch.nn.Parameter(placed(mesh, torch.ones(4), "Partial"))])


@pytest.mark.parametrize("stepped", [False, True])
def test_a_gradient_of_another_kind_than_its_parameter_is_refused_as_torch_does(mesh: Any, stepped: bool) -> None:
    for sharded in (False, True):
        for kind in (PagedSGD, torch.optim.SGD):
            (p,) = params = [torch.nn.Parameter(placed(mesh, torch.ones(4)) if sharded else torch.ones(4))]
            optimizer = kind(params, lr=0.1, momentum=0.9)
            if stepped:
                step(mesh, params, optimizer)
            before = p.detach().clone()
            p.grad = torch.ones(4) if sharded else placed(mesh, torch.ones(4))
            with pytest.raises(RuntimeError, match="DTensor"):
                optimizer.step()
            check_like({"param": p.detach()}, {"param": before})


@pytest.mark.parametrize("name", ["exp_avg", "step"])
def test_state_of_another_kind_than_its_parameter_is_refused(mesh: Any, name: str) -> None:
    params = [torch.nn.Parameter(placed(mesh, torch.ones(4)))]
    optimizer = PagedAdamW(params)
    step(mesh, params, optimizer)
    entry = optimizer.state[params[0]]
    before, saved = dict(entry), optimizer.state_dict()
    other = placed(mesh, torch.ones(()), "Replicate") if name == "step" else entry[name].to_local().clone()
    saved["state"] = {0: {**before, name: other}}
    with pytest.raises(ValueError, match="DTensor"):
        optimizer.load_state_dict(saved)
    assert all(entry[key] is value for key, value in before.items())
    entry[name] = other
    with pytest.raises(RuntimeError, match="DTensor" if name == "exp_avg" else "one number"):
        optimizer.step()
    entry[name] = placed(mesh, torch.zeros(4), "Replicate") if name == "exp_avg" else torch.zeros(4)
    with pytest.raises(RuntimeError, match="Replicate" if name == "exp_avg" else "one number"):
        optimizer.step()


def test_lists_of_dtensors_are_torchs_business_or_refused(mesh: Any) -> None:
    p = placed(mesh, torch.ones(4))
    (found,) = foreach_add([p], 2.0)
    assert torch.equal(found.to_local(), torch.full((4,), 3.0))
    lists = [[p], [placed(mesh, torch.ones(4))], [placed(mesh, torch.zeros(4))]]
    with pytest.raises(ValueError, match="DTensor, which has no memory of its own"):
        multi_tensor_apply(RULES["sgd_momentum"], lists, {"lr": 0.1, "momentum": 0.9, "step": 1})
