"""Steps queued under the next forward end in the bits of steps taken at once; without a fence they do not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlapped import Ended, Loop, agree, equal, run

from pagedopt.optim import optimizer as optimizers
from pagedopt.optim import queue as queued_steps
from pagedopt.optim.overlap import hooks
from pagedopt.optim.overlap import record as records
from pagedopt.optim.overlap.overlap import Overlap
from pagedopt.optim.overlap.record import Recorder
from pagedopt.optim.queue import QueuedStep
from tests.optim.overlapped_models import LONG, LOOPS, STEPS

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:this step was not queued.*no forward"),
    pytest.mark.filterwarnings("ignore:.* parameters of the optimizer are in no attached model"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
]


def steps(name: str) -> int:
    return STEPS.get(name, 3)


@functools.cache
def plainly(name: str) -> Ended:
    return run(LOOPS[name](), False, steps(name))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in LOOPS])
def test_bits_of_a_plain_step(name: str) -> None:
    """Losses, weights and state, while reads without a fence raise."""
    ended = agree(run(LOOPS[name](), True, steps(name)), plainly(name))
    assert not ended.plain


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", LOOPS)
def test_bits_of_200_steps(name: str) -> None:
    equal(LOOPS[name](), 200)


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


wait_for, finish = QueuedStep.wait_for, Overlap._finish


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
}


@pytest.mark.parametrize("name", FENCES)
def test_each_fence_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it bits differ, or what autograd has saved too early does not pass for its value."""
    where, method, instead, loop = FENCES[name]
    monkeypatch.setattr(where, method, instead)
    try:
        ended = run(LOOPS[loop](), True, steps(loop), watch=False)
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
        run(LOOPS[loop](), True, steps(loop))


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
    loop.start(False)
    loop.train(plain)
    loop.opts[0].attach(loop.models[0])
    loop.attached = True
    loop.train(3)
    begun: Any = loop.models[0].begun  # type: ignore[union-attr]
    assert begun[-36] < 5
    assert begun[-36:] == sorted(begun[-36:])
    assert begun[-1] >= loop.pages() - 1


def test_nothing_is_waited_for_but_what_a_module_reads() -> None:
    """Every page is hidden, but those of the forwards that recorded."""
    loop = Loop()
    loop.start(True)
    loop.train(6)
    report = loop.opts[0].overlap_report()
    loop.opts[0].wait()
    assert report.waited == loop.pages()  # of the last step, which no forward follows
    assert report.hidden == 5 * loop.pages()


def test_what_is_queued_is_a_value_of_the_overlap() -> None:
    """The queue is real: after a step parameters are as before, until somebody waits."""
    loop = Loop()
    loop.start(True)
    loop.train(1)
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
