"""Steps queued under the next forward end in the bits of steps taken at once; without a fence they do not."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import calls
from overlapped import Ended, Loop, agree, equal, run

from pagedopt.optim import optimizer as optimizers
from pagedopt.optim import queue as queued_steps
from pagedopt.optim.overlap import hooks
from pagedopt.optim.overlap import overlap as overlaps
from pagedopt.optim.overlap import record as records
from pagedopt.optim.overlap.overlap import Overlap
from pagedopt.optim.overlap.record import Recorder
from pagedopt.optim.pending import LastLaunches
from pagedopt.optim.queue import QueuedStep
from tests.optim.overlapped_loops import ACTS, HIDE, LOOPS, TRAINED, loop_of, often_and_long

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:this step was not queued"),
    pytest.mark.filterwarnings("ignore:.* parameters of the optimizer are in no attached model"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
]


@functools.cache
def plainly(name: str) -> Ended:
    return run(loop_of(name), False)


@pytest.mark.parametrize("name", often_and_long(TRAINED))
def test_bits_of_a_plain_step(name: str) -> None:
    """Losses, weights and state, while reads without a fence raise."""
    loop = loop_of(name)
    ended = agree(run(loop, True), plainly(name), loop.hides)
    assert (ended.plain, ended.outside) == (loop.plain, loop.outside)


def test_all_resident_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """Nothing is hidden where nothing is away."""
    run(loop_of("all is resident"), True)
    assert not [each for each in recwarn if "no page" in str(each.message)]


def test_an_optimizer_without_a_model() -> None:
    """The fences of one that is not attached do nothing."""
    (opt,) = Loop().start(False, 3).opts
    with opt.waited():
        opt.wait()
    opt.detach()
    assert opt.overlap_report().hidden == 0


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", LOOPS)
def test_bits_of_200_steps(name: str) -> None:
    equal(loop_of(name), 200)


def _nothing(*_: Any, **__: Any) -> Any:
    return None


def _but_in(caller: Callable[..., Any]) -> Callable[..., int]:
    def wait(self: QueuedStep, *launches: int) -> int:
        return 0 if sys._getframe(1).f_code is caller.__code__ else wait_for(self, *launches)

    return wait


def _behind_other_hooks(self: Overlap, module: torch.nn.Module) -> None:
    begins = module in self._models
    module.register_forward_pre_hook(self._begin if begins else self._enter)
    module.register_forward_hook(self._leave)
    self._hook_anew = lambda _: None  # type: ignore[method-assign]
    self._wait_for = _own_alone  # type: ignore[method-assign]


def _order_alone(self: Recorder, slots: Any) -> None:
    self.order.update(dict.fromkeys(slots or ()))


def _own_alone(queued: QueuedStep, module: torch.nn.Module, _: Any) -> None:
    queued.wait_for(queued.launches_before(module._parameters.values()))


def _as_if_known(self: Overlap) -> None:
    if sys._getframe(1).f_code is not Overlap._wait_for.__code__:
        finish(self)


def _in_any_mode(self: Overlap, queued: Any, module: torch.nn.Module, call: Any) -> None:
    training, module.training = module.training, True
    try:
        wait_in_mode(self, queued, module, call)
    finally:
        module.training = training


wait_for, finish, wait_in_mode = QueuedStep.wait_for, Overlap._finish, Overlap._wait_for


#: What is taken out, and the loop that shows it.
FENCES: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "modules": (Overlap, "_wait_for", _nothing, "plain"),
    "the record, in out_proj": (Recorder, "_note", _order_alone, "attention"),
    "the record, in F.linear": (Recorder, "_note", _order_alone, "functional"),
    "before other hooks": (Overlap, "_hook", _behind_other_hooks, "old weight_norm"),
    "the end of the forward": (QueuedStep, "wait_for", _but_in(Overlap.leave), "regularizer"),
    "unrecorded modules": (Overlap, "_finish", _as_if_known, "late"),
    "parameters outside": (QueuedStep, "wait_for", _but_in(Overlap._queue), "encoder outside"),
    "memory that cannot be told": (queued_steps, "cannot_be_told", lambda _: False, "transforms"),
    "a record that cannot tell": (records, "cannot_be_told", lambda _: False, "recorded in a transform"),
    "other optimizers": (optimizers, "wait_for_others", _nothing, "two over the same"),
    "what is known of a module": (overlaps, "addresses_in", lambda _: [], "parameters change places"),
    "what is known of launches": (LastLaunches, "__eq__", lambda *_: True, "the launches are others"),
    "what is known of a mode": (Overlap, "_wait_for", _in_any_mode, "evaluation of one module"),
}


@pytest.mark.parametrize("name", FENCES)
def test_each_fence_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it bits differ, or what autograd has saved too early does not pass for its value."""
    where, method, instead, loop = FENCES[name]
    monkeypatch.setattr(where, method, instead)
    try:
        ended = run(loop_of(loop), True, watch=False)
    except RuntimeError as error:
        if not any(said in str(error) for said in ("before it was waited for", "modified by an inplace operation")):
            raise
    else:
        assert not ended.same(plainly(loop))


@pytest.mark.parametrize("name", ["modules", "the record, in F.linear", "unrecorded modules"])
def test_a_missing_fence_is_found_by_watching(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, method, instead, loop = FENCES[name]
    monkeypatch.setattr(where, method, instead)
    with pytest.raises(RuntimeError, match=r"reads parameter .* which is still to be updated"):
        run(loop_of(loop), True)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ACTS if name not in (*HIDE, "add_param_group", "attach again")])
def test_the_fence_of_an_act_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fences numbers differ, or are refused."""
    plain = run(loop_of(name), False, 4)
    monkeypatch.setattr(Overlap, "wait", lambda self: None)
    monkeypatch.setattr(QueuedStep, "finish", lambda self: self.wait_for())
    with contextlib.suppress(RuntimeError):
        assert not run(loop_of(name), True, 4, watch=False).same(plain)


@pytest.mark.parametrize("plain", [0, 2], ids=["attached at once", "behind two steps"])
def test_pages_go_in_the_order_of_first_use(plain: int) -> None:
    """A model whose modules are called backwards: the first module waits for few pages, the last for all."""

    class Backwards(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(36))
            self.begun: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
                if loop.attached and (queued := loop.opts[0]._overlap.queued) is not None:
                    self.begun.append(queued.begun)
            return x

    loop = Loop(lambda width: [Backwards(width)])
    equal(loop, 4)
    loop.start(False, plain)
    loop.opts[0].attach(loop.models[0])
    loop.attached = True
    loop.train(3)
    begun: Any = loop.models[0].begun  # type: ignore[union-attr]
    assert begun[-36] < 5
    assert begun[-36:] == sorted(begun[-36:])
    assert begun[-1] >= loop.pages() - 1


def test_nothing_is_waited_for_but_what_a_module_reads() -> None:
    """Every page is hidden, but those of the forwards that recorded."""
    loop = Loop().start(True, 6)
    report = loop.opts[0].overlap_report()
    loop.opts[0].wait()
    assert report.waited == loop.pages()  # of the last step, which no forward follows
    assert report.hidden == 5 * loop.pages()


def test_what_is_queued_is_a_value_of_the_overlap() -> None:
    """The queue is real: after a step parameters are as before, until somebody waits."""
    loop = Loop().start(True, 1)
    loop.gradients()
    before = [p.detach().clone() for p in loop.models[0].parameters()]
    loop.opts[0].step()
    assert all(map(torch.equal, before, loop.models[0].parameters()))
    queued = loop.opts[0]._overlap.queued
    assert isinstance(queued, QueuedStep)
    assert not queued.begun
    loop.models[0][0](loop.batch())
    loop.opts[0].wait()
    assert not any(map(torch.equal, before, loop.models[0].parameters()))
    assert hooks.known


# --- parameters that no attached model holds: their pages come first, and ``step()`` waits for them -------------------


def two_models(attached: int = 2) -> Loop:
    """An encoder and a decoder; the last ones are ``attached``."""
    return loop_of("encoder outside", attach=lambda loop: loop.models[-attached:]).start(True)


def said(loop: Loop, steps: int) -> list[str]:
    """What is said of parameters outside in some steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loop.train(steps)
    return [str(each.message) for each in found if "are in no attached model" in str(each.message)]


def test_their_pages_come_first_and_no_other_is_waited_for() -> None:
    """The encoder is updated when ``step()`` returns, and of the decoder what shares a page with it."""
    loop, plain = two_models(1), loop_of("encoder outside").start(False, 3)
    loop.train(3)
    queued, (encoder, decoder) = loop.opts[0]._overlap.queued, loop.models
    assert 0 < queued.begun <= sum(p.numel() for p in encoder.parameters()) // 1024 + 2
    assert all(map(torch.equal, encoder.parameters(), plain.models[0].parameters()))
    assert sum(map(torch.equal, decoder.parameters(), plain.models[1].parameters())) < 5
    loop.opts[0].wait()
    assert all(map(torch.equal, decoder.parameters(), plain.models[1].parameters()))


def test_it_is_said_once() -> None:
    (text,) = said(two_models(1), 3)
    assert text.startswith("18 of 90 parameters of the optimizer are in no attached model, and step() waits")
    assert not said(two_models(), 3)


def test_a_parameter_without_gradients_is_not_spoken_of() -> None:
    loop = two_models(1)
    loop.models[0].requires_grad_(False)
    loop.models[0][4].requires_grad_(True)  # type: ignore[index]
    assert "2 of 90" in said(loop, 3)[0]


def test_parameters_of_a_model_that_has_died_are_outside() -> None:
    loop = two_models()
    loop.train(2)
    encoder = list(loop.models.pop(0).parameters())
    gc.collect()
    loop.gradients()
    for p in encoder:
        p.grad = torch.ones_like(p)
    with pytest.warns(RuntimeWarning, match="18 of 90 parameters"):
        loop.opts[0].step()
    now = [p.detach().clone() for p in encoder]
    loop.opts[0].wait()
    assert all(map(torch.equal, now, encoder))


# --- what a module waits for is looked for once -----------------------------------------------------------------------


def pending() -> tuple[Loop, Any]:
    """A loop whose step is queued, and that."""
    loop = Loop().start(True, 4)
    queued = loop.opts[0]._overlap.queued
    assert queued.begun == 0
    return loop, queued


def test_behind_ctrl_c_a_module_within_is_the_outermost() -> None:
    """Its call waits for all, as no call of the model goes on."""
    loop, queued = pending()
    net: Any = loop.models[0]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = net[20].register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        net(loop.batch())
    handle.remove()
    assert 0 < queued.begun < queued.total
    net[0](loop.batch())
    assert queued.begun == queued.total


def test_a_known_module_costs_few_calls() -> None:
    """Of functions of the package; a Linear, a ReLU and a Linear made 299 of all kinds."""
    loop, _ = pending()
    x, net = loop.batch(), loop.models[0]
    modules = len(list(net.modules()))
    waiting, passed = (len(calls(lambda: net(x))) for _ in range(2))
    assert passed <= 8 * modules + 40
    assert waiting <= 30 * modules + 100
