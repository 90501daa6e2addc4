"""A queued update that can no longer be made, or was made too late, is told: once, and not by what heals or ends."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import python
from file_support import open_files
from often import long_but
from overlapped import Loop, equal, linears
from torch import nn

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:this step was not queued.*no forward")]


def pending(**options: Any) -> Loop:
    """A model whose update is queued, and whose gradients are kept."""
    loop = Loop(**options).start(True, 2)
    loop.gradients()
    loop.opts[0].step()
    assert loop.opts[0]._overlap.queued.begun == 0
    return loop


def _in_the_middle(loop: Loop) -> nn.Parameter:
    return loop.models[0][len(loop.models[0]) // 2].weight  # type: ignore[index]


def _state(loop: Loop) -> torch.Tensor:
    return loop.opts[0].state[_in_the_middle(loop)]["exp_avg"]


def _gradient(loop: Loop) -> torch.Tensor:
    grad = _in_the_middle(loop).grad
    assert grad is not None
    return grad


def _away_and_back(tensor: torch.Tensor) -> None:
    """As sharding by hand does: memory is freed, others take it, and it comes back somewhere else."""
    kept, storage = tensor.detach().clone(), tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    _away_and_back.others = [torch.zeros_like(kept) for _ in range(8)]  # type: ignore[attr-defined]
    storage.resize_(size)
    tensor.data.copy_(kept)


#: Memory that a launch would read or write is another tensor's by now.
REPLACED: dict[str, Callable[[Loop], Any]] = {
    "parameter shared": lambda loop: _in_the_middle(loop).share_memory_(),
    "parameter freed": lambda loop: _in_the_middle(loop).untyped_storage().resize_(0),
    "parameter away and back": lambda loop: _away_and_back(_in_the_middle(loop)),
    "gradient shared": lambda loop: _gradient(loop).share_memory_(),
    "gradient freed": lambda loop: _gradient(loop).untyped_storage().resize_(0),
    "state shared": lambda loop: _state(loop).share_memory_(),
    "state with other data": lambda loop: setattr(_state(loop), "data", _state(loop).clone()),
}


@pytest.mark.parametrize("act", REPLACED.values(), ids=list(REPLACED))
def test_memory_that_was_replaced_is_not_followed(act: Callable[[Loop], Any]) -> None:
    """Nothing is written there; the error rises once, and the state is damaged until it is loaded."""
    loop = pending()
    (opt,), (model,) = loop.opts, loop.models
    saved = copy.deepcopy(torch.optim.AdamW.state_dict(opt))
    act(loop)
    params = [p for p in model.parameters() if p.untyped_storage().nbytes()]
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="given other memory before it was waited for"):
        opt.wait()
    same = [*map(torch.equal, before, params)]
    assert all(same)
    opt.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"damaged: .* given other memory .* load_state_dict"):
            opt.step()
    opt.load_state_dict(saved)
    opt.zero_grad()
    if len(params) == len([*model.parameters()]):
        loop.train(2)


def test_memory_that_is_replaced_in_a_forward() -> None:
    """Launches before it are made, those behind it are not; the step that follows tells."""
    loop = pending()
    (opt,), (model,) = loop.opts, loop.models
    opt.zero_grad()
    middle = model[len(model) // 2]  # type: ignore[index]

    def share(*_: object) -> None:
        middle.weight.share_memory_()

    model[4].register_forward_hook(share)  # type: ignore[index]
    before = [p.detach().clone() for p in model.parameters()]
    loop.gradients()
    same = [*map(torch.equal, before, model.parameters())]
    assert not same[0]
    assert all(same[-4:])
    with pytest.raises(RuntimeError, match=r"given other memory .* was not taken"):
        opt.step()


def _others(params: Any) -> None:
    for p in params:
        p.data = p.data.clone()


LOUD: dict[str, Callable[[Loop], Any]] = {
    "wait": lambda loop: loop.opts[0].wait(),
    "waited": lambda loop: loop.opts[0].waited().__enter__(),
    "state_dict": lambda loop: loop.opts[0].state_dict(),
    "decoded_state_dict": lambda loop: loop.opts[0].decoded_state_dict(),
    "model.state_dict": lambda loop: loop.models[0].state_dict(),
    "a part's state_dict": lambda loop: loop.models[0][0].state_dict(),  # type: ignore[index]
    "step": lambda loop: loop.opts[0].step(),
    "detach": lambda loop: loop.opts[0].detach(),
}


@pytest.mark.parametrize("name", LOUD)
def test_what_tells_of_a_lost_update(name: str) -> None:
    """Parameters were given other memory, which the update does not write."""
    loop = pending()
    _others(loop.models[0].parameters())
    with pytest.raises(RuntimeError, match="a parameter was given other memory before it was waited for"):
        LOUD[name](loop)
    hooked = any(module._forward_pre_hooks for module in loop.models[0].modules())
    assert hooked is (name != "detach")
    for act in LOUD.values():  # once
        act(loop)


QUIET: dict[str, Callable[[Loop], Any]] = {
    "load_state_dict": lambda loop: loop.opts[0].load_state_dict(torch.optim.AdamW.state_dict(loop.opts[0])),
    "model.load_state_dict": lambda loop: loop.models[0].load_state_dict(linears().state_dict()),
    "deepcopy": lambda loop: copy.deepcopy(loop.opts[0]),
    "memory_report": lambda loop: loop.opts[0].memory_report(),
    "cast": lambda loop: loop.models[0].double().float(),
    "fork": lambda loop: (os.fork() or os._exit(0)) and os.wait(),
}


@pytest.mark.parametrize(
    ("name", "replaced"),
    [(name, replaced) for name in QUIET for replaced in (False, True) if name != "deepcopy" or not replaced],
)
def test_what_heals_or_only_passes_by_raises_nothing(name: str, replaced: bool) -> None:
    """And what tells does so all the same."""
    loop = pending()
    if replaced:
        _in_the_middle(loop).share_memory_()
    else:
        _others(loop.models[0].parameters())
    QUIET[name](loop)
    if name == "load_state_dict":  # what the error would be about is gone
        loop.opts[0].wait()
        return
    with pytest.raises(RuntimeError, match="given other memory before it was waited for"):
        loop.opts[0].wait()


def test_a_dead_optimizer_warns() -> None:
    loop = pending()
    _others(loop.models[0].parameters())
    gc.collect()
    overlap = loop.opts[0]._overlap
    with pytest.warns(RuntimeWarning, match="a parameter was given other memory before it was waited for"):
        loop.opts.clear()
    assert not overlap.misuse


AT_EXIT = """
import sys
sys.path[:0] = {paths}
from tests.optim.test_overlap_lost import REPLACED, pending
loops = [pending() for _ in range(2)]
REPLACED["parameter freed"](loops[0])
REPLACED["gradient shared"](loops[1])
"""


def test_the_end_of_the_process() -> None:
    """It warns, and ends as it would without."""
    python("-W", "ignore", "-c", AT_EXIT.format(paths=sys.path), fresh=True)


class Early(nn.Module):
    """Reads a parameter of its own before it calls a child, in methods."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(width))
        self.net = linears(width)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + self.pos)

    forward = features


def trained_by(method: str, **options: Any) -> Loop:
    return Loop(lambda width: [Early(width)], forward=lambda loop, x: getattr(loop.models[0], method)(x), **options)


@pytest.mark.parametrize("method", ["features", "forward"])
def test_a_model_that_is_trained_by_a_method(method: str) -> None:
    """Its steps are taken at once: what it reads before it calls a child passes no hook."""
    with pytest.warns(RuntimeWarning, match=r"attach\(\) the modules that are called"):
        equal(trained_by(method, hides=False), 4, watch=False)


def test_the_modules_that_are_called_are_attached() -> None:
    """The remedy: their steps are queued, and step() waits for what the method reads itself."""
    with pytest.warns(RuntimeWarning, match="in no attached model"):
        equal(trained_by("features", attach=lambda loop: [loop.models[0].net]), 4, watch=False)  # type: ignore[list-item]


@pytest.mark.parametrize("child", [False, True], ids=["alone", "beside its child"])
def test_a_method_behind_a_call_of_the_model(child: bool) -> None:
    """Its step was queued, and the method has read an old parameter when it calls a child, attached itself or not."""
    loop = trained_by("__call__", attach=lambda loop: [loop.models[0], *([loop.models[0].net] if child else [])])  # type: ignore[list-item]
    loop.start(True, 2)
    model, opt = loop.models[0], loop.opts[0]
    with pytest.raises(RuntimeError, match=r"a Sequential is called .* parameter 'pos' .* still to be updated"):
        model.features(loop.batch())
    assert opt._overlap._calls.now is None
    loop.train(2)
    with opt.waited():
        model.features(loop.batch())
    loop.train(1)
    opt.wait()
    model.net(loop.batch())  # nothing is pending


# --- a copy, an end and a fork while a step is queued -----------------------------------------------------------------


@functools.cache
def plainly() -> list[torch.Tensor]:
    """Parameters after three steps that are taken at once."""
    return [p.detach() for p in Loop().start(False, 3).models[0].parameters()]


@pytest.mark.parametrize("act", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_model_is_refused_while_its_update_is_queued(act: Callable[[Any], Any]) -> None:
    loop = Loop().start(True, 3)
    with pytest.raises(RuntimeError, match=r"call optimizer\.wait\(\) before"):
        act(loop.models[0])
    loop.opts[0].wait()
    made = act(loop.models[0])
    twin = pickle.loads(made) if isinstance(made, bytes) else made
    assert all(map(torch.equal, twin.parameters(), plainly()))
    twin(loop.batch()).sum().backward()  # its hooks are dead
    assert not loop.opts[0]._overlap._seen


def test_an_optimizer_is_deleted_while_its_update_is_queued() -> None:
    """The model is updated."""
    loop = Loop().start(True, 3)
    loop.opts.clear()
    gc.collect()
    assert all(map(torch.equal, loop.models[0].parameters(), plainly()))
    loop.models[0](loop.batch())


def test_a_model_is_deleted_while_its_update_is_queued(folder: Path) -> None:
    loop = Loop().start(True, 3)
    params = list(loop.models[0].parameters())
    loop.models.clear()
    gc.collect()
    loop.opts[0].wait()
    assert all(map(torch.equal, params, plainly()))
    loop.opts.clear()
    gc.collect()
    assert open_files(folder) == 0


def test_nothing_is_left_of_what_was_attached(folder: Path) -> None:
    """Without the garbage collector's help."""
    loop = Loop().start(True, 3)
    loop.opts[0].detach()
    gc.collect()
    gc.disable()
    try:
        loop.opts.clear()
        assert open_files(folder) == 0
    finally:
        gc.enable()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in loop.models[0].modules())


CHILD = """
import atexit, os, sys, torch, warnings
sys.path[:0] = {paths}
from overlapped import Loop
loop = Loop().start(True)
model = loop.models[0]
def say():
    print(sum(p.detach().double().abs().sum().item() for p in model.parameters()))
def state():
    print(sum(p.double().abs().sum().item() for p in model.state_dict().values()))
if sys.argv[1] == "before":
    atexit.register(say)  # runs behind what was registered later
loop.train(3)
if sys.argv[1] == "state":
    atexit.register(state)
if sys.argv[1] == "fork":
    child = os.fork()
    if not child:
        with torch.no_grad():
            model(loop.batch())
        say()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("when", [*long_but(["before", "state"], lambda when: False), "fork"])
def test_exit_and_fork(when: str) -> None:
    """A process that ends carries out what is queued, and so does one that forks."""
    said = python("-W", "ignore", "-c", CHILD.format(paths=sys.path), when, fresh=when != "fork")
    assert float(said) == sum(p.double().abs().sum().item() for p in plainly())
