"""Parameters of an optimizer that no attached model holds: their pages come first, and ``step()`` waits for them."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from overlapped import Loop, Models, equal, linears
from torch import nn

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
