"""Blocks of int8 state lie along the strides of its codes, whatever strides its parameter is given later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from int8_support import same
from int8_training import PLACES
from often import long_but
from optim_support import COPIES

from pagedopt import PagedAdamW, PagedOptimizer

pytestmark = pytest.mark.usefixtures("folder")
Layout = Callable[[torch.Tensor], torch.Tensor]


def in_order(*dims: int, every: int = 1) -> Layout:
    """The dimensions by falling stride, and one of so many elements of memory."""
    back = [dims.index(dim) for dim in range(len(dims))]
    return lambda t: torch.stack([t.permute(dims)] * every, -1)[..., 0].permute(back)


LAYOUTS: dict[str, Layout] = {
    "contiguous": torch.Tensor.contiguous,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": in_order(3, 1, 2, 0),
    "with gaps": in_order(0, 1, 2, 3, every=2),
    "channels last with gaps": in_order(0, 2, 3, 1, every=3),
}
PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS]
#: Those that `make test` takes.
OFTEN = {
    ("contiguous", "channels last"), ("channels last", "contiguous"), ("contiguous", "transposed"),
    ("channels last with gaps", "contiguous"), ("transposed", "with gaps"),
    ("channels last", "channels last with gaps"),
}  # fmt: skip
#: The last block is short; blocks of the second are the same in the first two layouts; the third's state is float32.
SHAPES = ((6, 20, 7, 9), (90, 50, 1, 1), (3, 4, 5, 6))


def parameters(layout: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [torch.nn.Parameter(LAYOUTS[layout](torch.randn(shape, generator=generator))) for shape in SHAPES]


def lay_out(params: list[torch.nn.Parameter], layout: str) -> None:
    """As ``model.to(memory_format=…)`` does."""
    for p in params:
        p.data = LAYOUTS[layout](p.data)


def train(opt: torch.optim.Optimizer, params: list[torch.nn.Parameter], first: int, last: int) -> None:
    """Gradients are 1,000 times as large in some channels as in others, so that scales of other blocks show."""
    for step in range(first, last):
        for number, p in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + number)
            sizes = torch.logspace(-2, 1, p.shape[1]).view(1, -1, 1, 1)
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * sizes)
        opt.step()


def trained(layout: str, steps: int = 2, **options: Any) -> tuple[PagedOptimizer, list[torch.nn.Parameter]]:
    params = parameters(layout)
    opt = PagedAdamW(params, lr=1e-2, state_format="int8", seed=3, **options)
    train(opt, params, 0, steps)
    return opt, params


def values(opt: PagedOptimizer, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Parameters and decoded state."""
    state = opt.decoded_state_dict()["state"]
    return [t for i, p in enumerate(params) for t in (p.detach(), *state[i].values())]


def clones(opt: PagedOptimizer) -> None:
    """State outside of what the budget covers."""
    for entry in opt.state.values():
        entry.update({name: tensor.clone() for name, tensor in entry.items()})


#: What happens to an optimizer whose parameters have been given other strides.
LATER: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "to": ("resident", lambda both: both),
    "to, away": ("part", lambda both: both),
    **{how: ("resident", made) for how, made in COPIES.items()},
    **{f"{how}, away": ("file", made) for how, made in COPIES.items()},
    "budget": ("budgets", lambda both: (both[0].set_device_budget("70%"), both)[1]),
    "spill": ("spill()", lambda both: (both[0].spill(), both)[1]),
    "unspill": ("spill()", lambda both: (both[0].spill(), both[0].unspill(), both)[2]),
    "clones": ("file", lambda both: (clones(both[0]), both[0].set_device_budget("70%"), both)[2]),
}  # fmt: skip


def is_often(case: tuple[str, str, str]) -> bool:
    *layouts, how = case
    return layouts == ["contiguous", "channels last"] or (tuple(layouts) in OFTEN and how in ("to", "to, away"))


CASES = [(*pair, how) for pair in PAIRS for how in LATER]


@pytest.mark.parametrize("case", long_but(CASES, is_often), ids=", ".join)
def test_strides_that_change_in_training_change_no_number(case: tuple[str, str, str]) -> None:
    """A layout that changes back is followed, too; gradients have the strides of today."""
    before, after, how = case
    place, act = LATER[how]
    still, theirs = trained(before, 5)
    opt, params = trained(before, **PLACES[place])
    lay_out(params, after)
    opt, params = act((opt, params))
    train(opt, params, 2, 3)
    lay_out(params, before)
    train(opt, params, 3, 4)
    lay_out(params, after)
    opt, params = act((opt, params))
    train(opt, params, 4, 5)
    assert same(values(opt, params), values(still, theirs))


def test_states_whose_blocks_lie_apart_are_refused_and_nothing_has_changed() -> None:
    opt, params = trained("channels last")
    entry = opt.state[params[0]]
    entry["exp_avg_sq.root4"] = entry["exp_avg_sq.root4"].contiguous()
    want = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=r"state 'exp_avg_sq.root4' of parameter 0 .* blocks lie along the strides"):
        train(opt, params, 2, 3)
    assert same(want, [p.detach() for p in params])


def test_state_of_an_expanded_parameter_is_decoded_as_loaded() -> None:
    """A step refuses the parameter, but a checkpoint goes through."""
    p = torch.nn.Parameter(torch.ones(90).expand(70, 90))
    saved = {"step": 1, "exp_avg": torch.randn(70, 90), "exp_avg_sq": torch.rand(70, 90)}
    opt = PagedAdamW([p], state_format="int8")
    opt.load_state_dict({**opt.state_dict(), "state": {0: saved}})
    state = opt.decoded_state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert (state[name] - saved[name]).abs().max() < 0.02 * saved[name].abs().max()
