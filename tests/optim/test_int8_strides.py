"""Blocks of int8 state lie along the strides of its codes, whatever strides its parameter is given later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import int8_oracle as oracle
import pytest
import torch
from int8_support import flat, same
from int8_training import PLACES

import pagedopt
from pagedopt import PagedAdamW, PagedOptimizer
from pagedopt.formats import Column, Format

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
#: The layout of a parameter, and the one that it gets.
PAIRS = [
    ("contiguous", "channels last"), ("channels last", "contiguous"), ("contiguous", "transposed"),
    ("channels last with gaps", "contiguous"), ("transposed", "with gaps"),
    ("channels last", "channels last with gaps"),
]  # fmt: skip
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


def columns_of(saved: dict[str, torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
    """What an entry of int8 state has to be for a parameter as ``like``: itself, or decoded by NumPy and encoded."""
    made: list[torch.Tensor] = []
    for name, root in (("exp_avg", 3), ("exp_avg_sq", 4)):
        codes, absmax = saved[f"{name}.root{root}"], saved[f"{name}.absmax"]
        decoded = torch.empty_like(codes, dtype=torch.float32)
        flat(decoded).copy_(torch.from_numpy(oracle.decode(root, flat(codes).numpy(), absmax.numpy())))
        wanted = torch.empty_like(like, requires_grad=False)
        if torch.equal(flat(wanted.copy_(decoded)), flat(decoded)):
            made += [flat(codes), absmax]
        else:
            made += [torch.from_numpy(t) for t in oracle.encode(root, flat(wanted).numpy())]
    return made


#: What happens to an optimizer whose parameters have been given other strides.
LATER: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "to": ("resident", lambda both: both),
    "to, away": ("part", lambda both: both),
    "deepcopy": ("resident", copy.deepcopy),
    "deepcopy, away": ("file", copy.deepcopy),
    "budget": ("file", lambda both: (both[0].set_device_budget("70%"), both)[1]),
    "spill": ("file", lambda both: (both[0].unspill(), both[0].spill(), both)[2]),
}  # fmt: skip


CASES = [*((*pair, how) for pair in PAIRS for how in ("to", "to, away"))]
CASES += [("contiguous", "channels last", how) for how in LATER if not how.startswith("to")]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
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


def test_a_load_lays_state_out_as_its_parameter_again_and_steps_need_no_copies() -> None:
    opt, params = trained("contiguous")
    lay_out(params, "channels last")
    train(opt, params, 2, 3)
    want = [columns_of(opt.state[p], p) for p in params[:2]]
    assert not opt._plan.launches[-1].lists.as_they_are
    opt.load_state_dict(opt.state_dict())
    for p, columns in zip(params[:2], want, strict=True):
        assert same([flat(t) for name, t in opt.state[p].items() if name != "step"], columns)
    train(opt, params, 3, 4)
    assert all(launch.lists.as_they_are for launch in opt._plan.launches)


def test_states_whose_blocks_lie_apart_are_refused_and_nothing_has_changed() -> None:
    opt, params = trained("channels last")
    entry = opt.state[params[0]]
    entry["exp_avg_sq.root4"] = entry["exp_avg_sq.root4"].contiguous()
    want = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=r"state 'exp_avg_sq.root4' of parameter 0 .* blocks follow the strides"):
        train(opt, params, 2, 3)
    assert same(want, [p.detach() for p in params])


@dataclass(frozen=True, kw_only=True)
class Firsts(Format):
    """One number for 256 neighbours, that of the first: no column has an entry for each element."""

    name: str = "firsts"
    columns: tuple[Column, ...] = (Column("first", torch.float32, 256),)
    block: int = 256
    cuda_type: str = "Firsts"
    numba_load: str = "for i in range(live):\n    x[i] = S(first[0])"
    numba_store: str = "first[0] = np.float32(x[0])"

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One of each block."""
        return (values[::256].float(),)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Each 256 times."""
        return columns[0].repeat_interleave(256)[:numel]


@dataclass(frozen=True, kw_only=True)
class Differences(Format):
    """Each number less the first of its block, and that: it has an entry for each element."""

    name: str = "differences"
    columns: tuple[Column, ...] = (Column("rest", torch.float32), Column("first", torch.float32, 256))
    block: int = 256
    cuda_type: str = "Differences"
    numba_load: str = "for i in range(live):\n    x[i] = S(rest[i] + first[0])"
    numba_store: str = "first[0] = np.float32(x[0])\nfor i in range(live):\n    rest[i] = np.float32(x[i]) - first[0]"

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The differences, and one of each block."""
        first = values[::256].float()
        return values - first.repeat_interleave(256)[: len(values)], first

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Their sums."""
        return columns[0] + columns[1].repeat_interleave(256)[:numel]


@pagedopt.rule
def drift(param, grad, fast, slow, *, lr):  # type: ignore[no-untyped-def]
    fast = 0.5 * fast + 0.5 * grad
    slow = 0.9 * slow + 0.1 * grad
    param = param - lr * (fast + slow)
    return param, fast, slow


class Drift(PagedOptimizer):
    """Descent along two averages."""

    rule = drift
    has_step: ClassVar = False

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr}, **options)


def test_without_codes_blocks_are_of_the_flattened_parameter_and_other_state_lies_as_they_do() -> None:
    """Strides that change, a state that is made anew, and a load; one of the two states has codes."""
    results, formats = [], {"fast": Firsts(), "slow": Differences()}
    for first, second, third in (("contiguous",) * 3, ("transposed", "channels last with gaps", "channels last")):
        params = parameters(first)
        opt = Drift(params, state_format=formats)
        train(opt, params, 0, 2)
        lay_out(params, second)
        for entry in opt.state.values():
            del entry["slow.rest"], entry["slow.first"]
        train(opt, params, 2, 3)
        saved, params = opt.state_dict(), [torch.nn.Parameter(LAYOUTS[third](p.data)) for p in params]
        opt = Drift(params, state_format=formats)
        opt.load_state_dict(saved)
        for i, p in enumerate(params):
            assert same([*opt.state[p].values()], [*saved["state"][i].values()])
        train(opt, params, 3, 4)
        results.append(values(opt, params))
    assert same(*results)
