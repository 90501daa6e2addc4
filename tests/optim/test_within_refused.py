"""What steps within backwards do not do is refused in words that say what to do; nothing is damaged by that."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from forks import in_child
from torch import nn
from torch.utils.checkpoint import checkpoint

from pagedopt import PagedAdamW
from tests.optim.test_within import ALL, by_hand
from tests.optim.within_toys import adamw, arrive, attached, bits, gradient, held, same, trained

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")]


@pytest.fixture(autouse=True)
def _open_steps_end() -> Iterator[None]:
    """Those of optimizers that are garbage."""
    yield
    gc.collect()


class DistributedDataParallel(nn.Module):
    """By its name it is torch's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def scaled(model: nn.Module) -> Any:
    """Of a scaler it has taken a step."""
    opt = adamw(model, fused=True)
    arrive(model, 0)
    opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    opt.step()
    del opt.grad_scale, opt.found_inf  # type: ignore[attr-defined]
    opt.param_groups[0]["fused"] = False
    return opt


def twice(model: nn.Module) -> Any:
    opt = adamw(model)
    opt.attach(model, overlap="backward")
    model.first = opt  # type: ignore[assignment] # alive
    return adamw(model)


AttachCase = tuple[Callable[[Any], Any], Callable[[Any], Any], str]
#: What is attached to which model, and what is said of it.
ATTACH: dict[str, AttachCase] = {
    "max_grad_norm": (lambda m: adamw(m, max_grad_norm=1.0), lambda m: m, "max_grad_norm is 1.0: .*attach.model."),
    "fused": (lambda m: adamw(m, fused=True), lambda m: m, "fused=True.*leave the flag out"),
    "capturable": (lambda m: adamw(m, capturable=True), lambda m: m, "capturable=True.*leave the flag out"),
    "scaler": (scaled, lambda m: m, "a GradScaler scales the loss.*bfloat16 needs none"),
    "DDP": (adamw, DistributedDataParallel, "DistributedDataParallel, which gathers or reduces.*attach.model. hides"),
    "DDP within": (adamw, lambda m: nn.Sequential(DistributedDataParallel(m)), r"Parallel \(its module '0'\)"),
    "another model": (adamw, lambda m: held(), "holds no parameter of this optimizer"),
    "two devices": (
        lambda m: PagedAdamW([*m.parameters(), nn.Parameter(torch.ones(2, device="meta"))]), lambda m: m, "meta"
    ),
    "two optimizers": (twice, lambda m: m, "has another optimizer with overlap='backward'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ATTACH)
def test_what_cannot_be_attached(case: str) -> None:
    make, module, words = ATTACH[case]
    model = held()
    with pytest.raises(ValueError, match=words):
        make(model).attach(module(model), overlap="backward")


def test_an_optimizer_that_was_refused_goes_on() -> None:
    model, other = held(), held()
    opt, plain = adamw(model), adamw(other)
    with pytest.raises(ValueError, match="holds no parameter"):
        opt.attach(held(), overlap="backward")
    for net, one in ((model, opt), (other, plain)):
        arrive(net, 0)
        one.step()
    assert same(bits(model, opt), bits(other, plain))


def test_one_overlap_at_a_time() -> None:
    model, opt = attached()
    for overlap in ("forward", "backward"):
        with pytest.raises(ValueError, match="is attached with overlap='backward'; detach"):
            opt.attach(model, overlap=overlap)
    opt.detach()
    opt.attach(model)
    with pytest.raises(ValueError, match="is attached with overlap='forward'; detach"):
        opt.attach(model, overlap="backward")


def set_norm(model: Any, opt: Any) -> None:
    opt.max_grad_norm = 1.0


def second_backward(model: Any, opt: Any) -> None:
    arrive(model, 1)


def graph_of_gradients(model: Any, opt: Any) -> None:
    p = next(model.parameters())
    p.pow(3).sum().backward(create_graph=True)


def sparse(model: Any, opt: Any) -> None:
    p = next(model.parameters())
    p.backward(torch.ones_like(p).to_sparse())


def scale(model: Any, opt: Any) -> None:
    opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    try:
        arrive(model, 1, [0])
    finally:
        del opt.grad_scale, opt.found_inf


def again_by_hand(model: Any, opt: Any) -> None:
    p = [*model.parameters()][-1]
    p.grad = torch.ones_like(p)
    try:
        opt.step()
    finally:
        p.grad = None


#: What is done when two gradients of a step have come, and what is said of it.
MIDWAY: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "a second gradient": (second_backward, r"parameter 6 of shape \(900,\) has a second gradient before step"),
    "a gradient by hand": (again_by_hand, "was updated within the backward, and has a gradient again"),
    "create_graph": (graph_of_gradients, "create_graph=True.*leave it out"),
    "a sparse gradient": (sparse, "the gradient of parameter 0 .* is sparse.*sparse=False"),
    "a scale": (scale, "a GradScaler scales the loss"),
    "max_grad_norm": (set_norm, "max_grad_norm is set to 1.0: the norm of all gradients"),
    "attach": (lambda m, o: o.attach(m, overlap="backward"), r"attach\(\) in the middle .* has updated 2"),
    "detach": (lambda m, o: o.detach(), r"detach\(\) in the middle of a step.*call step\(\) before"),
    "state_dict": (lambda m, o: o.state_dict(), r"state_dict\(\) in the middle"),
    "decoded_state_dict": (lambda m, o: o.decoded_state_dict(), r"state_dict\(\) in the middle"),
    "load_state_dict": (lambda m, o: o.load_state_dict({}), r"load_state_dict\(\) in the middle"),
    "add_param_group": (lambda m, o: o.add_param_group({}), r"add_param_group\(\) in the middle"),
    "set_device_budget": (lambda m, o: o.set_device_budget(None), r"set_device_budget\(\) in the middle"),
    "spill": (lambda m, o: o.spill(), r"spill\(\) in the middle"),
    "unspill": (lambda m, o: o.unspill(), r"unspill\(\) in the middle"),
    "deepcopy": (lambda m, o: copy.deepcopy(o), r"deepcopy\(\) in the middle"),
    "pickle": (lambda m, o: pickle.dumps(o), r"getstate\(\) in the middle"),
}  # fmt: skip


@pytest.mark.parametrize("case", MIDWAY)
def test_what_cannot_be_done_in_the_middle_of_a_step(case: str) -> None:
    """It is refused, and the step goes on and ends as if it had not been tried."""
    act, words = MIDWAY[case]
    model, opt = attached()
    arrive(model, 0, ALL[:-3:-1])
    with pytest.raises(RuntimeError, match=words):
        act(model, opt)
    for p in model.parameters():
        p.grad = None
    arrive(model, 0, ALL[-3::-1])
    opt.wait()
    opt.memory_report()
    opt.step()
    assert same(bits(model, opt), trained(False, steps=1))


def test_a_backward_that_fails_is_ended_by_step() -> None:
    """It takes the gradients that came; the next backward says so, if nobody has called it."""

    def backward(model: Any, fails: bool) -> None:
        arrive(model, 0, ALL[:2:-1])
        if fails:
            raise torch.OutOfMemoryError("says the test")

    model, opt = attached()
    with pytest.raises(torch.OutOfMemoryError):
        backward(model, True)
    with pytest.raises(RuntimeError, match=r"Call step\(\) after each backward, also after one that has failed"):
        backward(model, False)
    assert not opt.damaged
    opt.step()
    other = held()
    plain = adamw(other)
    backward(other, False)
    plain.step()
    for net, one in ((model, opt), (other, plain)):
        one.zero_grad()
        arrive(net, 1)
        one.step()
    assert same(bits(model, opt), bits(other, plain))


def test_a_scale_that_shows_in_step_leaves_state_damaged() -> None:
    model, opt = attached()
    arrive(model, 0)
    opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match=r"a GradScaler scales the loss.*before they are unscaled"):
        opt.step()
    del opt.grad_scale, opt.found_inf
    for act in (opt.step, opt.state_dict, lambda: arrive(model, 1)):
        with pytest.raises(RuntimeError, match=r"is damaged.*GradScaler"):
            act()
    opt.load_state_dict(adamw(held()).state_dict())
    for p in model.parameters():
        p.grad = None
    arrive(model, 1)
    opt.step()


def param_data(model: Any, _: Any) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def swapped(model: Any, _: Any) -> None:
    for p in model.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))


def resized(model: Any, _: Any) -> None:
    for p in model.parameters():
        p.untyped_storage().resize_(1 << 20)


def state_data(_: Any, opt: Any) -> None:
    for entry in opt.state.values():
        entry["exp_avg"].data = entry["exp_avg"].data.clone()


#: What replaces memory that the rest of a step would still write; the last two leave nothing there without pages.
OTHER_MEMORY: list[tuple[Callable[[Any, Any], object], tuple[Any, ...]]] = [
    (param_data, (0, None)), (resized, (0, None)), (state_data, (0, None)), (lambda m, o: m.share_memory(), (0, None)),
    (swapped, (0,)), (lambda m, o: m.double(), (0,)),
]  # fmt: skip


@pytest.mark.parametrize(("act", "budget"), [(act, budget) for act, budgets in OTHER_MEMORY for budget in budgets])
def test_memory_that_is_replaced_in_the_middle_of_a_step(act: Callable[[Any, Any], object], budget: Any) -> None:
    """Nothing is launched over memory that has been given back."""
    model, opt = attached(device_budget=budget)
    for step in range(2):
        arrive(model, step)
        opt.step()
    arrive(model, 2, ALL[:-3:-1])
    act(model, opt)

    def go_on() -> None:
        if all(p.dtype is torch.float32 for p in model.parameters()):
            arrive(model, 2, ALL[-3::-1])
        opt.step()

    with pytest.raises(RuntimeError, match="was given other memory between a backward and the step"):
        go_on()
    assert "was given other memory" in opt.damaged


def test_a_fork_in_the_middle_of_a_step() -> None:
    """The child has no thread that moves pages: it says so, and waits for none."""
    model, opt = attached()
    arrive(model, 0, ALL[:-3:-1])

    def child() -> bool:
        with pytest.raises(RuntimeError, match="forked in the middle of a step of its parent"):
            opt.step()
        return True

    assert in_child(child)
    arrive(model, 0, ALL[-3::-1])
    opt.step()


def test_a_scaler_that_unscales_before_step_says_that_there_is_nothing() -> None:
    """As it cannot be seen; the next backward is refused."""
    model, opt = attached()
    scaler = torch.amp.GradScaler("cpu")
    p = next(model.parameters())
    scaler.scale(p.sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(opt)
    with pytest.raises(RuntimeError, match="has a second gradient"):
        p.sum().backward()


class Shared(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(30, 30), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant).tanh()  # type: ignore[union-attr]
        return x


def test_blocks_that_share_a_weight_and_are_checkpointed() -> None:
    """Reentrant checkpoints give it a gradient for each block."""
    x = torch.ones(2, 30, requires_grad=True)
    for reentrant in (False, True):
        model = Shared(reentrant)
        opt = adamw(model)
        opt.attach(model, overlap="backward")
        loss = model(x).sum()
        if not reentrant:
            loss.backward()
            opt.step()
        else:
            with pytest.raises(RuntimeError, match="checkpointed with use_reentrant=True: take False"):
                loss.backward()


def test_a_parameter_that_is_there_twice() -> None:
    p = nn.Parameter(torch.ones(3000))
    with pytest.warns(UserWarning, match="duplicate"):
        opt = PagedAdamW([p, p], device_budget=0)
    model = nn.ParameterList([p])
    with pytest.raises(ValueError, match="is in the optimizer twice"):
        opt.attach(model, overlap="backward")


def test_an_error_of_the_plain_part_comes_behind_the_step() -> None:
    """What the backward has updated is counted."""
    model, opt = attached()
    arrive(model, 0, ALL[:1:-1])
    by_hand(opt, model, 0)
    first = next(model.parameters())
    first.grad = gradient(first, 0, 0).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        opt.step()
    assert {int(entry["step"]) for entry in opt.state.values()} == {1}
    assert len(opt.state) == len(ALL) - 2
