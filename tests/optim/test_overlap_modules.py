"""Modules that join an attached model, lose their hooks, or get others in front of them, and those that take none."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from often import long_but
from overlapped import Loop, equal, linears
from torch import nn

from pagedopt.optim.overlap.overlap import Overlap
from tests.optim.overlapped_joins import JOINS, loop_of
from tests.optim.overlapped_models import Functional

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:this step was not queued.*no forward"),
]
SHORT = (
    "parametrization",
    "a wrapped layer",
    "cleared hooks",
    "cleared hooks behind",
    "a hook in front that reads another",
)


def trained(steps: int = 3) -> Loop:
    """A model whose update is queued."""
    loop = Loop()
    loop.start(True)
    loop.train(steps)
    return loop


@pytest.mark.parametrize("name", long_but(JOINS, lambda name: name in SHORT))
def test_modules_change_while_a_step_is_queued(name: str) -> None:
    """The next forward has the bits of a plain one, and those behind it hide again."""
    ended = equal(loop_of(name, queued=True), 6)
    assert not ended.plain
    assert ended.hidden > 2 * ended.pages


@pytest.mark.long
@pytest.mark.parametrize("name", JOINS)
def test_modules_change_while_none_is_queued(name: str) -> None:
    equal(loop_of(name, queued=False), 6)


def test_modules_are_compared_only_while_a_step_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in its first forward; twice in an iteration, as ``step()`` does it too."""
    loop, calls, unhooked = trained(), [], Overlap._unhooked
    monkeypatch.setattr(Overlap, "_unhooked", lambda self, modules: (calls.append(1), unhooked(self, modules))[1])
    loop.forward(loop.batch())
    assert len(calls) == 1
    loop.forward(loop.batch())
    loop.models[0].eval()
    loop.forward(loop.batch())
    assert len(calls) == 1
    loop.models[0].train()
    loop.train(1)
    assert len(calls) == 2


def test_a_hook_in_front_of_the_outermost_module_is_told() -> None:
    """It has run before any of ours: too late to wait for what it may have read."""
    loop = trained()
    handle = loop.models[0].register_forward_pre_hook(lambda *_: None, prepend=True)
    loop.gradients()
    with pytest.raises(RuntimeError, match=r"a hook was put in front of those of attach\(\) and has run before"):
        loop.opts[0].step()
    loop.train(2)
    handle.remove()
    loop.opts[0].wait()
    loop.models[0].register_forward_pre_hook(lambda *_: None, prepend=True)
    loop.train(2)


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("script", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 40))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_with_a_scripted_module_is_refused(script: Any) -> None:
    """Before a hook is set, on the modules or the optimizer; it is named."""
    net = linears(40, 3)
    net[2] = script(net[2])
    loop = Loop(lambda _: [net])
    loop.start(False)
    (opt,) = loop.opts
    with pytest.raises(ValueError, match=r"does not take a (Script|Traced)Module \(its module '2'\).* calls no hooks"):
        opt.attach(net)
    assert hooks_of(net) == 0
    assert not opt._optimizer_step_pre_hooks
    assert opt._overlap is None
    loop.train(1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_that_joins_makes_steps_plain() -> None:
    """It cannot wait."""

    def act(loop: Loop) -> None:
        if loop.number == 2:
            loop.opts[0].wait()
            net: Any = loop.models[0]
            with torch.no_grad():
                twin = nn.Linear(net[2].in_features, net[2].out_features)
                twin.load_state_dict(net[2].state_dict())
            twin.weight, twin.bias = net[2].weight, net[2].bias
            net[2] = torch.jit.script(twin)

    with pytest.warns(RuntimeWarning, match="a module has joined the model, and attach.. does not take a ScriptModule"):
        ended = equal(Loop(behind=act), 6, hidden=False)
    assert sum(ended.plain.values()) == 3


def test_hooks_that_cannot_be_set_leave_none() -> None:
    class Odd(nn.Module):
        def register_state_dict_pre_hook(self, hook: Any) -> Any:
            raise OSError("no room for hooks")

    loop = Loop(lambda width: [nn.Sequential(Odd(), *linears(width, 3), Odd())])
    loop.start(False)
    with pytest.raises(OSError, match="no room"):
        loop.opts[0].attach(loop.models[0])
    assert hooks_of(loop.models[0]) == 0
    assert not loop.opts[0]._optimizer_step_pre_hooks


@pytest.mark.parametrize("name", ["Enter", "Leave", "Raised", "Fence", "Load"])
def test_a_hook_in_a_model_that_pagedopt_0_1_0_has_pickled(name: str) -> None:
    """Its class is found by that name, and it does nothing."""
    hook = pickle.loads(f"cpagedopt.optim.overlap.hooks\n{name}\n(tR.".encode())
    module = nn.Linear(2, 2)
    if name == "Enter":
        module.register_forward_pre_hook(hook)
    elif name in ("Leave", "Raised"):
        module.register_forward_hook(hook, always_call=True)
    else:
        module.register_state_dict_pre_hook(hook)
    module(torch.ones(1, 2))
    pickle.loads(pickle.dumps(module)).state_dict()


def test_a_layer_that_was_replaced_is_not_kept_alive() -> None:
    """Nor the weight that others read of it."""

    class Reads(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.other, self.net = nn.Linear(width, width), linears(width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.net(nn.functional.linear(x, self.other.weight))
            return y

    loop = Loop(lambda width: [Reads(width)])
    loop.start(True)
    loop.train(3)
    (opt,), model = loop.opts, loop.models[0]
    opt.wait()
    old: Any = model.other
    weight = weakref.ref(old.weight)
    for p in old.parameters():
        opt.state.pop(p, None)
        opt.param_groups[0]["params"] = [each for each in opt.param_groups[0]["params"] if each is not p]
    model.other = nn.Linear(old.in_features, old.out_features)  # type: ignore[assignment]
    opt.add_param_group({"params": list(model.other.parameters())})
    del old, p
    loop.train(2)
    gc.collect()
    assert weight() is None
    opt.wait()


def test_a_record_refers_to_no_parameter() -> None:
    """``swap_tensors`` asks that nobody has a weak reference to a tensor."""
    loop, plain = Loop(lambda width: [Functional(width)]), Loop(lambda width: [Functional(width)])
    for each in (loop, plain):
        each.start(each is loop)
        each.gradients()
        each.models[0].zero_grad()
        with torch.no_grad():
            for p in each.models[0].parameters():
                torch.utils.swap_tensors(p, nn.Parameter(2 * p))
        each.train(3)
    assert all(map(torch.equal, loop.values(), plain.values()))
