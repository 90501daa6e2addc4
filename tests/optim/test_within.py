"""Steps within backwards end in the bits of steps behind them, and gradients are given back on the way."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlapped import Loop, carriers, run
from torch import nn

from pagedopt import PagedNAdam
from pagedopt.optim.overlap import cycle
from pagedopt.placements.file import FileArena
from tests.optim.overlapped_loops import LOOPS, loop_of, often_and_long
from tests.optim.within_toys import (
    SHAPES,
    Act,
    Held,
    adamw,
    arrive,
    assert_same_bits,
    attached,
    bits,
    gradient,
    held,
    same,
    trained,
)
from tests.outside.rule import Tempered
from tests.specs import BF16, CASES, F32, F64, Case

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
    pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract"),
    pytest.mark.filterwarnings("ignore:.* bytes of optimizer state are in tensors outside of the pages"),
]
#: Loops with gradients that are added up, clipped or scaled; and one whose gradients two optimizers take.
REFUSED = ("accumulation", "clipping", "scaler", "two over the same")


class SmallPages(FileArena):
    """Pages of 512 elements in float64."""

    name = "file of small pages for all dtypes"
    granule = stretch = 4096


def within(name: str, **changes: Any) -> Loop:
    return loop_of(name, overlap="backward", attach=lambda loop: loop.models[:1], **changes)


@pytest.mark.parametrize("name", often_and_long(name for name in LOOPS if name not in REFUSED))
def test_bits_of_a_plain_step(name: str) -> None:
    loop = within(name)
    queued, plain = (run(loop, attached, loop.enough + 1, watch=False) for attached in (True, False))
    assert queued.same(plain)


ALL = [*range(len(SHAPES))]
#: In which order gradients come: as expected, in the other order, in two orders by turns, and not all of them.
ORDERS: dict[str, Callable[[int], list[int]]] = {
    "the last first": lambda step: ALL[::-1],
    "the first first": lambda step: ALL,
    "shuffled": lambda step: random.Random(step).sample(ALL, len(ALL)),
    "some": lambda step: [i for i in ALL[::-1] if (i + step) % 3],
    "some never": lambda step: ALL[::-2],
    "none at first": lambda step: ALL if step else [],
}


@pytest.mark.parametrize("budget", [0, "8KiB", None])
@pytest.mark.parametrize("order", ORDERS)
def test_bits_in_any_order(order: str, budget: Any) -> None:
    def taken(opt: Any, model: Held, step: int) -> None:
        if opt._within is not None:
            late = order == "some" and step == 1  # a first gradient behind the first step is left to step()
            assert any(p.grad is not None for p in model.parameters()) == late

    optimizer = functools.partial(adamw, device_budget=budget)
    assert_same_bits(optimizer=optimizer, behind=taken, order=ORDERS[order], steps=7)


FORMATS: list[tuple[tuple[torch.dtype, ...], Any]] = [
    ((F32,), None), ((BF16,), None), ((F64,), None), ((BF16, F32), "float32"), ((F32, F64, BF16), None),
    ((F32,), "int8"), ((BF16, F32), "int8"), ((F32,), "bfloat16"),
]  # fmt: skip
RULES = ("adamw", "amsgrad", "momentum", "nesterov", "sgd", "lion")


@pytest.mark.parametrize("budget", [0, "12KiB"])
@pytest.mark.parametrize(
    ("rule", "stored"),
    [*((rule, FORMATS[3]) for rule in RULES), *(("adamw", stored) for stored in FORMATS), ("lion", FORMATS[6])],
    ids=str,
)
def test_bits_of_rules_and_formats(rule: str, stored: Any, budget: Any) -> None:
    """In two groups with hyperparameters of their own, which change from step to step."""
    case: Case = CASES[rule]
    dtypes, form = stored
    options = {"placement": SmallPages, "device_budget": budget, **({"state_format": form} if case.names else {})}

    def optimizer(model: Held) -> Any:
        params = [*model.parameters()]
        return case.make(False, [{"params": params[:3]}, {"params": params[3:], **case.other}], **options)

    def anneal(opt: Any, model: Held, step: int) -> None:
        for group in opt.param_groups:
            group["lr"] *= 0.9

    assert_same_bits(model=functools.partial(held, dtypes), optimizer=optimizer, before=anneal)


@pytest.mark.parametrize("kind", [PagedNAdam, Tempered])
def test_bits_of_rules_with_numbers_of_each_parameter_s_own(kind: Any) -> None:
    """And state that begins at one."""
    away = {"placement": SmallPages, "device_budget": 0}
    assert_same_bits(optimizer=lambda model: kind(model.parameters(), **away), order=ORDERS["some"])


def freeze(opt: Any, model: Held, step: int) -> None:
    """Some parameters require gradients only from the third step on, others until then."""
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 2 == 0 if step < 2 else i % 3 == 0)


def grow(opt: Any, model: Held, step: int) -> None:
    if step == 2:
        more = [nn.Parameter(torch.ones(40, 60)), nn.Parameter(torch.ones(5, dtype=F64))]
        model.params.extend(more)
        opt.add_param_group({"params": more, "lr": 0.2})


def by_hand(opt: Any, model: Held, step: int) -> None:
    """Gradients that no backward has made."""
    for i, p in enumerate([*model.parameters()][:2]):
        p.requires_grad_(False)
        p.grad = gradient(p, i, step)


def edit_state(opt: Any, model: Held, step: int) -> None:
    """Other tensors, other values, a load."""
    if step == 2:
        p = next(model.parameters())
        opt.state[p]["exp_avg"] = torch.full_like(p, 0.25)
        opt.state[[*model.parameters()][-1]]["exp_avg_sq"].mul_(0.5)
    if step == 3:
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def move_parameters(opt: Any, model: Held, step: int) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def change_budget(opt: Any, model: Held, step: int) -> None:
    opt.set_device_budget([0, "8KiB", None, "50%"][step])


def other_strides(opt: Any, model: Held, step: int) -> None:
    """A gradient that is there keeps its strides, which are not its parameter's, and is copied."""
    p = [*model.parameters()][5]
    assert not p.is_contiguous()
    p.grad = torch.zeros(p.shape)


def gaps(opt: Any, model: Held, step: int) -> None:
    """All gradients in a launch with such a parameter are left to ``step()``."""
    if step == 0:
        p = next(model.parameters())
        p.data = p.data.repeat(1, 2)[:, ::2]


def complex_numbers(opt: Any, model: Held, step: int) -> None:
    if step == 0:
        model.params.append(nn.Parameter(torch.ones(30, dtype=torch.complex64)))
        opt.add_param_group({"params": [model.params[-1]]})
    else:
        p = model.params[-1]
        (p.abs().square().sum() * step).backward()


EDITS = (freeze, grow, by_hand, edit_state, move_parameters, change_budget, other_strides, gaps, complex_numbers)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_bits_after_edits(edit: Act) -> None:
    assert_same_bits(before=edit, order=ORDERS["the first first"])


def test_hyperparameters_are_those_of_the_first_gradient() -> None:
    def rate(opt: Any, model: Held, step: int) -> None:
        opt.param_groups[0]["lr"] = 0.1 / (1 + step)

    def too_late(opt: Any, model: Held, step: int) -> None:
        if opt._within is not None:
            opt.param_groups[0]["lr"] = 77.0

    (*params, one), (*others, other) = (trained(attached, before=rate, behind=too_late) for attached in (True, False))
    assert same(params, others)
    assert same(one["state"], other["state"])


def test_gradients_are_given_back_on_the_way() -> None:
    """At no time are more alive than a few of those of a plain step."""
    loop = within("plain").start(True, 1)
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    def note(p: torch.Tensor) -> None:
        nonlocal most
        assert p.grad is None, "the optimizer has taken it"
        most = max(most, sum(ref() is not None for ref in alive))

    def before(p: torch.Tensor) -> None:
        assert p.grad is not None
        alive.append(weakref.ref(p.grad.untyped_storage()))

    params = [*loop.models[0].parameters()]
    (opt,) = loop.opts
    opt.detach()
    for p in params:
        p.register_post_accumulate_grad_hook(before)
    opt.attach(loop.models[0], overlap="backward")
    for p in params:
        p.register_post_accumulate_grad_hook(note)
    loop.gradients()
    assert len(alive) == len(params)
    assert 0 < most < len(params) / 5
    opt.step()
    gc.collect()
    assert not any(ref() for ref in alive)


def test_pages_pass_in_the_order_that_gradients_have() -> None:
    """From the second step on no page waits for another, whatever order was expected."""
    model, opt = attached()
    late = []
    for step in range(4):
        arrive(model, step, ORDERS["the first first"](step))
        late.append(opt._within._cycle.late)
        opt.step()
    assert late == [True, False, False, False]


def test_room_is_reserved_and_state_appears_with_step() -> None:
    model, opt = attached()
    reserved = opt.memory_report().by_place
    assert sum(reserved.values()) >= 8 * sum(p.numel() for p in model.parameters())
    assert not opt.state
    arrive(model, 0, ALL[:3])
    assert not opt.state
    opt.step()
    assert [*map(id, opt.state)] == [*map(id, [*model.parameters()][:3])]
    assert opt.memory_report().by_place == reserved


def test_a_detached_optimizer_takes_plain_steps() -> None:
    def change(opt: Any, model: Held, step: int) -> None:
        if step:
            opt.detach() if step % 2 else opt.attach(model, overlap="backward")

    def taken(opt: Any, model: Held, step: int) -> None:
        assert all((p.grad is None) == (step % 2 == 0) for p in model.parameters())

    assert same(trained(True, before=change, behind=taken), trained(False))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deep", "pickle"]
)
def test_a_copy_is_not_attached(copied: Callable[[Any], Any]) -> None:
    model, opt = attached()
    arrive(model, 0)
    opt.step()
    other, again = copied((model, opt))
    for each, its in ((model, opt), (other, again)):
        arrive(each, 1)
        assert (each is model) == all(p.grad is None for p in each.parameters())
        its.step()
    assert same(bits(model, opt), bits(other, again))


def test_autograd_refuses_what_reads_parameters_that_were_updated() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    opt = adamw(model)
    opt.attach(model, overlap="backward")
    x = torch.ones(2, 8, requires_grad=True)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)
    opt.step()


def test_a_step_that_nobody_ends_is_ended_before_the_process() -> None:
    """Later its thread would be gone, and whoever waited for its pages would wait for ever."""
    before = len(carriers())
    model, opt = attached()
    arrive(model, 0, ALL[:3])
    try:
        assert len(carriers()) == before + 1
        cycle._before_exit()
        assert len(carriers()) == before
    finally:
        with contextlib.suppress(RuntimeError):  # it was ended in the middle
            opt.step()


def test_nothing_is_left_of_an_optimizer_that_dies_within_a_step() -> None:
    """No thread, no page, no hook that acts."""
    before = len(carriers())
    model, opt = attached()
    arrive(model, 0, ALL[:3])
    assert len(carriers()) == before + 1
    del opt
    gc.collect()
    assert len(carriers()) == before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    arrive(model, 1)
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_that_are_unfrozen_later() -> None:
    """All are frozen when the model is attached: the first step is a plain one, the second within its backward."""
    model = held()
    model.requires_grad_(False)
    opt = adamw(model)
    opt.attach(model, overlap="backward")
    model.requires_grad_(True)
    for step in range(2):
        arrive(model, step)
        assert all((p.grad is None) == bool(step) for p in model.parameters())
        opt.step()
        opt.zero_grad()
