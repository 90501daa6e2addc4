"""The recorded forward: an interrupt or an error in it, several optimizers that record, and what is known behind it."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from injector import Outcome, interrupt_at
from overlapped import Loop, equal, linears
from shots import EVERY, NEVER, assert_rose
from torch import Tensor, nn

from pagedopt import PagedAdamW
from pagedopt.optim.overlap import record
from pagedopt.optim.overlap.overlap import Overlap
from pagedopt.optim.overlap.record import Recorder

pytestmark = [
    pytest.mark.timeout(600 if EVERY else 60),
    pytest.mark.filterwarnings("ignore:this step was not queued"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()


class Reads(nn.Module):
    """Its end reads a weight that is not its own; what comes before may raise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = linears(width)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        if self.error is not None:
            raise self.error
        return self.net[1:](F.linear(x, self.net[-2].weight))


def attached(optimizers: int, net: nn.Module) -> list[PagedAdamW]:
    made = [PagedAdamW(net.parameters(), device_budget=0, placement="file") for _ in range(optimizers)]
    for optimizer in made:
        optimizer.attach(net)
    return made


def assert_modes_are_whole(net: nn.Module) -> None:
    """A device mode works, before anything of ours runs again and after it; then no mode is left."""
    for _ in range(2):
        with torch.device("meta"):
            assert torch.empty(1).is_meta
        assert not torch.empty(1).is_meta
        net(torch.ones(2, 4))
        assert not modes()


@pytest.mark.parametrize("optimizers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_interrupt_in_the_recorded_forward(optimizers: int) -> None:
    """At each line of the package, or at every third."""
    x = torch.ones(2, 4)

    def shot(at: int) -> tuple[Outcome, nn.Module, list[PagedAdamW]]:
        net = nn.Sequential(nn.Linear(4, 4))
        made = attached(optimizers, net)
        return interrupt_at(at, signal.SIGINT, lambda: net(x)), net, made

    events = shot(NEVER)[0].events
    try:
        for at in range(1, events + 1, EVERY or 3):
            outcome, net, made = shot(at)
            assert_rose(outcome)
            assert_modes_are_whole(net)
            assert len(made) == optimizers
    finally:
        while modes():
            torch.overrides._pop_mode()


@pytest.mark.parametrize("within", [False, True], ids=["alone", "within a device mode"])
def test_an_interrupt_in_the_users_part_of_it(within: bool) -> None:
    """Also if a mode of the user stands above or below the recorder by the time that it is taken away."""
    net = Reads(4)
    (optimizer,) = attached(1, net)
    net.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        net(torch.ones(2, 4))
    net.error = None
    if within:
        with torch.device("meta"):
            optimizer.wait()
            assert torch.empty(1).is_meta
            assert len(modes()) == 1
    assert_modes_are_whole(net)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_was_not_reached_is_not_known(error: Callable[[], BaseException]) -> None:
    """A module whose recorded call did not end is recorded again: who knows what it reads."""

    def fails(loop: Loop) -> None:
        model: Any = loop.models[0]
        if loop.number == 0:
            model.net(loop.batch())  # from now on each weight is known to be read by its own module
            model.error = error()
            with pytest.raises((KeyboardInterrupt, ValueError)):
                model(loop.batch())
            model.error = None

    ended = equal(Loop(lambda width: [Reads(width)], before=fails), 4)
    assert not ended.plain


def test_recorders_of_several_optimizers_do_not_see_each_other_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are looked at as often for each of many optimizers as for one alone."""
    looks = 0

    def counted(tensor: Tensor) -> int | None:
        nonlocal looks
        looks += 1
        return memory_of(tensor)

    memory_of = record.memory_of
    monkeypatch.setattr(record, "memory_of", counted)
    counts = []
    for optimizers in (1, 5):
        net, looks = linears(4, 2), 0
        made = attached(optimizers, net)
        net(torch.ones(2, 4))
        counts.append(looks)
        assert not any(others for each in made for modes in each._overlap._reads.values() for others in modes.values())  # type: ignore[union-attr]
    assert counts[1] == 5 * counts[0]


def test_a_recorder_is_taken_away_from_between_others() -> None:
    other, frame = torch.overrides.BaseTorchFunctionMode, Any
    with other() as below:
        recorder = Recorder([], nn.Identity(), frame)  # type: ignore[arg-type]
        recorder.start(lambda *_: None)
        with other() as above:
            recorder.stop()
            recorder.stop()
            assert modes() == [below, above]
    assert not modes()


# --- modules that join an attached model, lose their hooks, get others in front of them, or take none -----------------


def test_modules_are_compared_only_while_a_step_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in its first forward; twice in an iteration, as ``step()`` does it too."""
    loop, calls, unhooked = Loop().start(True, 3), [], Overlap._unhooked
    monkeypatch.setattr(Overlap, "_unhooked", lambda self, modules: (calls.append(1), unhooked(self, modules))[1])
    loop.forward(loop, loop.batch())
    assert len(calls) == 1
    loop.forward(loop, loop.batch())
    loop.models[0].eval()
    loop.forward(loop, loop.batch())
    assert len(calls) == 1
    loop.models[0].train()
    loop.train(1)
    assert len(calls) == 2


def test_a_hook_in_front_of_the_outermost_module_is_told() -> None:
    """It has run before any of ours: too late to wait for what it may have read."""
    loop = Loop().start(True, 3)
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
def test_a_model_with_a_scripted_module_is_refused(script: Any) -> None:
    """Before a hook is set, on the modules or the optimizer; it is named."""
    net = linears(40, 3)
    net[2] = script(net[2])
    loop = Loop(lambda _: [net]).start(False)
    (opt,) = loop.opts
    with pytest.raises(ValueError, match=r"does not take a (Script|Traced)Module \(its module '2'\).* calls no hooks"):
        opt.attach(net)
    assert hooks_of(net) == 0
    assert not opt._optimizer_step_pre_hooks
    assert opt._overlap is None
    loop.train(1)


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
        ended = equal(Loop(behind=act, hides=False), 6)
    assert sum(ended.plain.values()) == 3


def test_hooks_that_cannot_be_set_leave_none() -> None:
    class Odd(nn.Module):
        def register_state_dict_pre_hook(self, hook: Any) -> Any:
            raise OSError("no room for hooks")

    loop = Loop(lambda width: [nn.Sequential(Odd(), *linears(width, 3), Odd())]).start(False)
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

    class Around(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.other, self.net = nn.Linear(width, width), linears(width)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.net(F.linear(x, self.other.weight))
            return y

    loop = Loop(lambda width: [Around(width)]).start(True, 3)
    (opt,), model = loop.opts, loop.models[0]
    opt.wait()
    old: Any = model.other
    weight = weakref.ref(old.weight)
    for p in old.parameters():
        opt.state.pop(p, None)
        opt.param_groups[0]["params"] = [each for each in opt.param_groups[0]["params"] if each is not p]
    model.other = nn.Linear(old.in_features, old.out_features)
    opt.add_param_group({"params": list(model.other.parameters())})
    del old, p
    loop.train(2)
    gc.collect()
    assert weight() is None
    opt.wait()


def test_a_shallow_copy_of_a_module_shares_its_hooks() -> None:
    loop = Loop().start(True)
    net: Any = loop.models[0]
    net[4] = copy.copy(net[4])
    loop.train(3)
    loop.opts[0].wait()
    net.load_state_dict(net.state_dict())
    copy.deepcopy(net)
    for _ in range(5):
        copy.copy(net)(loop.batch())
    assert len(net._forward_hooks) == 1


def test_a_closure_takes_a_module_out_of_the_model() -> None:
    """``step()`` waits for what no attached model holds any more, and says so."""

    def without_the_last(loop: Loop, gradients: Any) -> Tensor:
        loss: Tensor = gradients()
        net: Any = loop.models[0]

        def closure() -> None:
            if loop.number == 2:
                loop.tool, net[-2] = net[-2], nn.Identity()

        loop.opts[0].step(closure)
        loop.opts[0].zero_grad()
        if loop.tool is not None:
            loop.more.append(float(loop.tool.weight.detach().abs().sum()))
        return loss

    with pytest.warns(RuntimeWarning, match="2 of 72 parameters of the optimizer are in no attached model"):
        equal(Loop(step=without_the_last, hides=False), 4, watch=False)


def test_what_attach_refuses() -> None:
    (opt,), (model,) = (loop := Loop().start(False)).opts, loop.models
    with pytest.raises(ValueError, match="there are 'forward' and 'backward'"):
        opt.attach(model, overlap="sideways")
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        opt.attach(model.parameters())
    with pytest.raises(ValueError, match="does not take a DataParallel"):
        opt.attach(nn.DataParallel(model))
    with pytest.raises(RuntimeError, match="attach"):
        opt.watch_reads()
    opt.attach(model)
    with pytest.raises(ValueError, match="is attached"):
        opt.attach(model)
