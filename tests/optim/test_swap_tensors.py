"""``torch.utils.swap_tensors``, and ``module.to()`` by it, after a step, as with torch's optimizers.

``tests/acts.py`` swaps parameters and state of every optimizer; here is what swaps by itself, and what ids stand for,
as no tensor may be referred to.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optim_support import ADAMW, bits, model, same, train
from overlapped import Loop
from torch.nn import Parameter
from torch.utils import swap_tensors

from pagedopt import PagedAdamW
from tests.acts import convert
from tests.optim.overlapped_models import linears
from tests.optim.test_shards import mesh, placed
from tests.specs import CASES
from tests.world import INT8, Worlds

__all__ = ["mesh"]


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_module_is_converted_between_steps_and_its_state_is_in_8_bits() -> None:
    assert not Worlds(CASES["adamw"], *INT8).step(2).do(convert).step(2).over


def test_parameters_that_are_dtensors_are_converted(mesh: Any) -> None:
    """Of a wrapper ``module.to()`` swaps the tensors whatever is set."""
    torch.__future__.set_swap_module_params_on_conversion(False)
    ends = []
    for kind in (torch.optim.AdamW, PagedAdamW):
        net = torch.nn.Linear(3, 4, bias=False)
        net.weight = Parameter(placed(mesh, torch.linspace(-1, 1, 12).view(4, 3)))
        opt: Any = kind(net.parameters(), **ADAMW)
        for number in range(4):
            net.weight.grad = placed(mesh, torch.full((4, 3), 0.5 + number))
            opt.step()
            if number == 1:
                net.to(torch.float64).to(torch.float32)
                swap_tensors(opt.state[net.weight]["exp_avg"], opt.state[net.weight]["exp_avg"] * 2)
        ends.append(net.weight.full_tensor())  # type: ignore[operator]
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*are in tensors outside of the pages:RuntimeWarning")
def test_an_attached_model_is_converted_and_its_state_swapped_once_it_is_waited_for() -> None:
    loop, plain = Loop(lambda width: [linears(width)]), Loop(lambda width: [linears(width)])
    for each in (loop, plain):
        each.start(each is loop)
        each.train(3)
        (opt,) = each.opts
        opt.wait()
        for p in each.models[0].parameters():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                swap_tensors(opt.state[p][name], opt.state[p][name] * 2)
        each.models[0].to(torch.float64).to(torch.float32)
        each.train(3)
        opt.wait()
    assert all(map(torch.equal, loop.values(), plain.values()))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("options", [{}, {"device_budget": 0}], ids=str)
def test_what_was_swapped_out_is_freed_at_once(options: dict[str, Any]) -> None:
    net = model()
    opt = PagedAdamW(net.parameters(), **ADAMW, **options)
    train(net, opt, 2)
    arenas = [weakref.ref(arena) for arena in opt.store.arenas]
    seen: list[weakref.ref[Any]] = []
    for p in net.parameters():
        for t in (p, *opt.state[p].values()):
            other: Any = Parameter(t.detach() * 2) if t is p else t * 2
            p.grad = None
            swap_tensors(t, other)
            seen += [weakref.ref(other), weakref.ref(other.untyped_storage())]  # of these the optimizer made none
            del other
    assert [ref() for ref in seen] == [None] * len(seen)
    assert opt.store.arenas == []
    gc.collect()
    assert [ref() for ref in arenas] == [None] * len(arenas)


# --- ids that are used again ------------------------------------------------------------------------------------------


def reborn(holder: Any, name: Any, make: Callable[[], torch.Tensor]) -> None:
    """Put another tensor into the place of one, with the id that the first one had."""
    known, others = id(holder[name]), list[torch.Tensor]()
    holder[name] = None
    for _ in range(1_000_000):  # until the free blocks of that size are used up
        holder[name] = made = make()
        if id(made) == known:
            return
        others.append(made)  # alive: the next one has another id
    pytest.skip("no tensor was given that id: another block of that size was freed meanwhile")


def trained(count: int = 20) -> tuple[list[Parameter], PagedAdamW]:
    torch.manual_seed(3)
    params = [Parameter(torch.randn(900)) for _ in range(count)]
    opt = PagedAdamW(params, **ADAMW)
    step(params, opt, 0)
    step(params, opt, 1)
    return params, opt


def step(params: list[Parameter], opt: Any, number: int) -> None:
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 0.1 * number + i - 1)
    opt.step()


@pytest.mark.parametrize("name", ["exp_avg", "step"])
def test_a_tensor_with_the_id_memory_and_layout_of_another_is_that_one_to_a_launch(name: str) -> None:
    (params, opt), twin = trained(), trained()
    entry: Any = opt.state[params[2]]
    memory = entry[name].detach()
    reborn(entry, name, memory.detach)
    assert opt._plan is not None
    assert opt._plan.seen.compare(opt) is not None, "nothing is prepared anew"
    step(params, opt, 2)
    step(*twin, 2)
    assert same(bits(params, opt), bits(*twin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_tensor_with_the_id_of_another_whose_memory_has_gone_is_noticed(dtype: torch.dtype) -> None:
    """Even if it lies at the same address, as allocators like to have it."""
    params, opt = trained()
    entry: Any = opt.state[params[2]]
    block = torch.full((900,), 0.25).numpy()
    entry["exp_avg"] = torch.frombuffer(block, dtype=torch.float32, count=900)
    step(params, opt, 2)
    assert opt._plan is not None
    assert opt._plan.seen.compare(opt) is not None
    at = entry["exp_avg"].data_ptr()
    reborn(entry, "exp_avg", lambda: torch.frombuffer(block, dtype=dtype, count=900))
    assert entry["exp_avg"].data_ptr() == at
    assert opt._plan.seen.compare(opt) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_with_the_id_of_another_is_followed_as_any(dtype: torch.dtype) -> None:
    """The record knows parameters by their ids alone; what lies there is looked at in each step."""
    params, opt = trained()
    index = 2
    entry: Any = {
        name: value if name == "step" else value.to(dtype) for name, value in opt.state[params[index]].items()
    }
    memory = torch.linspace(-1, 1, 900, dtype=dtype)
    entries = [entry if i == index else opt.state[p] for i, p in enumerate(params)]
    opt.state.clear()
    del params
    reborn(opt.param_groups[0]["params"], index, lambda: Parameter(memory))
    params = opt.param_groups[0]["params"]
    opt.state.update(zip(params, entries, strict=True))
    theirs = Parameter(memory.clone())
    other = torch.optim.AdamW([theirs], **ADAMW)
    other.state[theirs] = {key: value.clone() for key, value in entry.items()}
    step(params, opt, 2)
    theirs.grad = params[index].grad
    other.step()
    torch.testing.assert_close(params[index], theirs, rtol=1e-5, atol=1e-6)
