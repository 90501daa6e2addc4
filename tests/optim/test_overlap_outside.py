"""Parameters of an optimizer that no attached model holds: their pages come first, and ``step()`` waits for them."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import calls
from overlapped import LAYERS, Loop, Models, agree, equal, linears, run
from torch import Tensor, nn

from pagedopt.optim.overlap import overlap as overlaps
from pagedopt.optim.overlap.overlap import Overlap
from pagedopt.optim.pending import LastLaunches

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:this step was not queued.*no forward")]
OUTSIDE = "are in no attached model"


def two(width: int) -> Models:
    return [linears(width, 9), linears(width)]


def started(decoder_alone: bool = True) -> Loop:
    loop = Loop(two, attach=lambda loop: loop.models[1:] if decoder_alone else loop.models)
    loop.start(True)
    return loop


def said(loop: Loop, steps: int) -> list[str]:
    """What is said of parameters outside in some steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loop.train(steps)
    return [str(each.message) for each in found if OUTSIDE in str(each.message)]


def outside(loop: Loop) -> int:
    return int(loop.opts[0].overlap_report().outside)


@pytest.mark.filterwarnings(f"ignore:.*{OUTSIDE}")
def test_their_pages_come_first_and_no_other_is_waited_for() -> None:
    """The encoder is updated when ``step()`` returns, and of the decoder what shares a page with it."""
    loop, plain = started(), Loop(two)
    plain.start(False)
    loop.train(3)
    plain.train(3)
    queued = loop.opts[0]._overlap.queued
    encoder, decoder = loop.models
    assert 0 < queued.begun <= sum(p.numel() for p in encoder.parameters()) // 1024 + 2
    assert all(map(torch.equal, encoder.parameters(), plain.models[0].parameters()))
    same = [*map(torch.equal, decoder.parameters(), plain.models[1].parameters())]
    assert sum(same) < 5
    loop.opts[0].wait()
    assert all(map(torch.equal, decoder.parameters(), plain.models[1].parameters()))


def test_it_is_said_once() -> None:
    loop = started()
    (text,) = said(loop, 3)
    assert text.startswith("18 of 90 parameters of the optimizer are in no attached model, and step() waits")
    assert outside(loop) == 18


def test_a_parameter_without_gradients_is_not_spoken_of() -> None:
    loop = started()
    loop.models[0].requires_grad_(False)
    loop.models[0][4].requires_grad_(True)
    assert "2 of 90" in said(loop, 3)[0]


def test_several_models_may_be_attached() -> None:
    loop = started(decoder_alone=False)
    assert not said(loop, 3)
    assert outside(loop) == 0
    assert loop.hidden() > loop.pages()


@pytest.mark.filterwarnings(f"ignore:.*{OUTSIDE}")
def test_a_model_that_is_attached_later() -> None:
    """What the first one reads of it was not noted."""

    class Reads(nn.Module):
        def __init__(self, width: int, other: nn.Linear) -> None:
            super().__init__()
            self.net, self.others = linears(width), [other]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.net(nn.functional.linear(x, self.others[0].weight))
            return y

    def make(width: int) -> Models:
        other = linears(width, 3)
        return [Reads(width, other[4]), other]  # type: ignore[arg-type]

    def later(loop: Loop) -> None:
        if loop.attached and loop.number == 3:
            loop.opts[0].attach(loop.models[1])

    equal(Loop(make, attach=lambda loop: loop.models[:1], before=later), 7)


def test_a_module_that_joins_a_model_is_in_it() -> None:
    def join(loop: Loop) -> None:
        if loop.number == 2:
            loop.models[0].append(nn.Linear(*[loop.batch().shape[-1]] * 2, device=loop.device))
            loop.opts[0].add_param_group({"params": list(loop.models[0][-1].parameters())})

    with warnings.catch_warnings():
        warnings.filterwarnings("error", OUTSIDE)
        equal(Loop(before=join), 6)


def test_parameters_of_a_model_that_has_died_are_outside() -> None:
    loop = Loop(two)
    loop.start(True)
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


# --- what a module waits for is looked for once; what makes it wrong is noticed, and each look is needed --------------


FIRST, LAST = 0, 2 * LAYERS - 2


def change_places(loop: Loop) -> None:
    """The first and the last layer change their weights once: then the first has to wait for the last page."""
    net: Any = loop.models[0]
    if loop.number == 4:
        net[FIRST].weight, net[LAST].weight = net[LAST].weight, net[FIRST].weight


def only_the_last(loop: Loop) -> None:
    """In every second step only the last layers have gradients: their launches are the first ones."""
    if loop.number % 2 == 0:
        net: Any = loop.models[0]
        for p in net[: LAST - 8].parameters():
            p.grad = None


class Switched(nn.Module):
    """In evaluation it reads the weight of another module, and not its own."""

    def __init__(self, own: nn.Linear, other: nn.Linear) -> None:
        super().__init__()
        self.own, self.other = own, [other]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            y: Tensor = self.own(x)
            return y
        return F.linear(x, self.other[0].weight, self.other[0].bias) + 0 * self.own(x)


def switched(width: int) -> list[nn.Module]:
    net: Any = linears(width)
    net[FIRST] = Switched(net[FIRST], net[LAST])
    return [net]


def switch(loop: Loop) -> None:
    net: Any = loop.models[0]
    net[FIRST].train(loop.number < 3)


class Twice(nn.Module):
    """Calls a module at two depths of the stack."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = linears(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
        return self.net(x)


LOOPS: dict[str, Callable[[], Loop]] = {
    "parameters change places": lambda: Loop(before=change_places),
    "the launches are others": lambda: Loop(between=only_the_last),
    "evaluation of one module": lambda: Loop(make=switched, before=switch),
    "two depths": lambda: Loop(make=lambda width: [Twice(width)]),
    "micro-batches": lambda: Loop(micro=3),
}


@pytest.mark.parametrize("name", LOOPS)
def test_bits_of_a_plain_step(name: str) -> None:
    agree(run(LOOPS[name](), True, 6), run(LOOPS[name](), False, 6))


def _in_any_mode(self: Overlap, queued: Any, module: nn.Module, call: Any) -> None:
    training, module.training = module.training, True
    try:
        wait_for(self, queued, module, call)
    finally:
        module.training = training


wait_for = Overlap._wait_for
LOOKS: dict[str, tuple[Any, str, Any]] = {
    "parameters change places": (overlaps, "addresses_in", lambda _: []),
    "the launches are others": (LastLaunches, "__eq__", lambda *_: True),
    "evaluation of one module": (Overlap, "_wait_for", _in_any_mode),
}


@pytest.mark.parametrize("name", LOOKS)
def test_each_look_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*LOOKS[name])
    try:
        ended = run(LOOPS[name](), True, 6, watch=False)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
    else:
        assert not ended.same(run(LOOPS[name](), False, 6))


def pending(loop: Loop) -> Any:
    loop.start(True)
    loop.train(4)
    queued = loop.opts[0]._overlap.queued
    assert queued.begun == 0
    return queued


def test_behind_ctrl_c_a_module_within_is_the_outermost() -> None:
    """Its call waits for all, as no call of the model goes on."""
    loop = Loop()
    queued, net = pending(loop), loop.models[0]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = net[20].register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        net(loop.batch())
    handle.remove()
    assert 0 < queued.begun < queued.total
    net[FIRST](loop.batch())
    assert queued.begun == queued.total


def test_a_known_module_costs_few_calls() -> None:
    """Of functions of the package; a Linear, a ReLU and a Linear made 299 of all kinds."""
    loop = Loop()
    pending(loop)
    x, net = loop.batch(), loop.models[0]
    modules = len(list(net.modules()))
    waiting, passed = (len(calls(lambda: net(x))) for _ in range(2))
    assert passed <= 8 * modules + 40
    assert waiting <= 30 * modules + 100
