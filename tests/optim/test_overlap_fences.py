"""Whatever is done while an update is queued gives the bits of a plain step, is refused in words, or is found."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import python
from file_support import open_files
from often import long_but
from overlapped import Loop, equal, linears, run

from pagedopt.optim.overlap.overlap import Overlap
from pagedopt.optim.queue import QueuedStep
from tests.optim.overlapped_acts import ACTS, HIDE, LONG, total

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:this step was not queued.*no forward")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in ACTS])
def test_what_is_done_between_a_step_and_the_next_forward(name: str) -> None:
    equal(Loop(behind=ACTS[name]), 3, hidden=name in HIDE)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ACTS if name not in (*HIDE, "add_param_group", "attach again")])
def test_their_fence_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fences numbers differ, or are refused."""
    plain = run(Loop(behind=ACTS[name]), False, 4)
    monkeypatch.setattr(Overlap, "wait", lambda self: None)
    monkeypatch.setattr(QueuedStep, "finish", lambda self: self.wait_for())
    try:
        queued = run(Loop(behind=ACTS[name]), True, 4, watch=False)
    except RuntimeError:
        return
    assert not queued.same(plain)


def pending() -> Loop:
    """A model whose update is queued."""
    loop = Loop()
    loop.start(True)
    loop.train(3)
    assert loop.opts[0]._overlap.queued.begun == 0
    return loop


def plain(steps: int = 3) -> Loop:
    loop = Loop()
    loop.start(False)
    loop.train(steps)
    return loop


@pytest.mark.parametrize("act", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_model_is_refused_while_its_update_is_queued(act: Callable[[Any], Any]) -> None:
    loop = pending()
    with pytest.raises(RuntimeError, match=r"call optimizer\.wait\(\) before"):
        act(loop.models[0])
    loop.opts[0].wait()
    made = act(loop.models[0])
    twin = pickle.loads(made) if isinstance(made, bytes) else made
    assert all(map(torch.equal, twin.parameters(), plain().models[0].parameters()))
    twin(loop.batch()).sum().backward()  # its hooks are dead
    assert not loop.opts[0]._overlap._seen


def test_an_optimizer_is_deleted_while_its_update_is_queued() -> None:
    """The model is updated."""
    loop = pending()
    loop.opts.clear()
    gc.collect()
    assert all(map(torch.equal, loop.models[0].parameters(), plain().models[0].parameters()))
    loop.models[0](loop.batch())


def test_a_model_is_deleted_while_its_update_is_queued(folder: Path) -> None:
    loop = pending()
    params = list(loop.models[0].parameters())
    loop.models.clear()
    gc.collect()
    loop.opts[0].wait()
    assert all(map(torch.equal, params, plain().models[0].parameters()))
    loop.opts.clear()
    gc.collect()
    assert open_files(folder) == 0


def test_nothing_is_left_of_what_was_attached(folder: Path) -> None:
    """Without the garbage collector's help."""
    loop = pending()
    loop.opts[0].detach()
    gc.collect()
    gc.disable()
    try:
        loop.opts.clear()
        assert open_files(folder) == 0
    finally:
        gc.enable()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in loop.models[0].modules())


def test_hooks_behind_steps_see_updated_parameters() -> None:
    def watch(loop: Loop) -> None:
        if loop.number == 1:
            loop.opts[0].register_step_post_hook(lambda *_: loop.more.append(total(loop.models[0].parameters())))

    with pytest.warns(RuntimeWarning, match=r"hooks that run after step\(\)"):
        ended = equal(Loop(before=watch), 4, hidden=False)
    assert ended.plain == {"hooks that run after step() may read parameters": 3}


def misused(act: Callable[[Loop], Any]) -> None:
    loop = pending()
    act(loop)
    loop.gradients()
    before = [p.detach().clone() for p in loop.models[0].parameters()]
    with pytest.raises(RuntimeError, match=r"before it was waited for.*was not taken"):
        loop.opts[0].step()
    assert all(map(torch.equal, before, loop.models[0].parameters()))
    loop.opts[0].step()
    loop.opts[0].wait()
    assert not any(map(torch.equal, before, loop.models[0].parameters()))


def _clamp(loop: Loop) -> None:
    with torch.no_grad():
        next(loop.models[0].parameters()).clamp_(-0.1, 0.1)


def _write_gradient(loop: Loop) -> None:
    p = next(loop.models[0].parameters())
    loop.gradients()
    grad = p.grad
    loop.opts[0].step()
    loop.opts[0].zero_grad()
    assert grad is not None
    grad.zero_()


def _unseen(loop: Loop) -> None:
    loop.models[0].forward = lambda x: x  # so that no hook but the outermost one's is called
    x = loop.batch()
    for module in loop.models[0]:
        x = module.forward(x)
    x.sum().backward()
    del loop.models[0].forward


@pytest.mark.parametrize("act", [_clamp, _write_gradient, _unseen])
def test_misuse_is_found_at_the_next_step(act: Callable[[Loop], Any]) -> None:
    """Too late to undo it, and never silent."""
    misused(act)


CHILD = """
import atexit, os, sys, torch, warnings
sys.path[:0] = {paths}
from overlapped import Loop
loop = Loop()
loop.start(True)
first = len(sys.argv) > 2
def say():
    print(sum(p.detach().double().abs().sum().item() for p in model.parameters()))
def state():
    print(sum(p.double().abs().sum().item() for p in model.state_dict().values()))
if sys.argv[1] == "before":
    atexit.register(say)  # runs behind what was registered later
loop.train(3)
model = loop.models[0]
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
    import sys

    said = python("-W", "ignore", "-c", CHILD.format(paths=sys.path), when, fresh=when != "fork")
    assert float(said) == sum(p.detach().double().abs().sum().item() for p in plain().models[0].parameters())


def test_what_attach_refuses() -> None:
    loop = Loop()
    loop.start(False)
    (opt,), (model,) = loop.opts, loop.models
    with pytest.raises(ValueError, match="there are 'forward' and 'backward'"):
        opt.attach(model, overlap="sideways")
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        opt.attach(model.parameters())
    with pytest.raises(ValueError, match="does not take a DataParallel"):
        opt.attach(torch.nn.DataParallel(model))
    with pytest.raises(RuntimeError, match="attach"):
        opt.watch_reads()
    opt.attach(model)
    with pytest.raises(ValueError, match="is attached"):
        opt.attach(model)


def test_all_resident_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """Nothing is hidden where nothing is away."""
    ended = equal(Loop(budget=None), 3, hidden=False)
    assert list(ended.plain) == ["no page of its state is off the device"]
    assert not [each for each in recwarn if "no page" in str(each.message)]


def test_an_optimizer_without_a_model() -> None:
    """The fences of one that is not attached do nothing."""
    loop = plain()
    with loop.opts[0].waited():
        loop.opts[0].wait()
    loop.opts[0].detach()
    assert loop.opts[0].overlap_report().hidden == 0
    assert linears(3, 1)
