"""Steps on a played card, of pages that visit it, lie in it, or move: no wait is missing, and no bit is not a CPU's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from often import both_ways, long_but
from support import BF16, F32

from pagedopt import ema
from tests.acts import absent, acts_of
from tests.card.card import Card
from tests.card.runs import Ends, Order, Run, ends_of, played, some_orders
from tests.specs import CASES
from tests.world import RESIDENT, SHAPES, Side, World, Worlds, give, parameter

SIZES = (3000, 17, 1500, 4097)


@dataclass(frozen=True)
class Kind:
    """What steps, with its options on every side, in how many of the places."""

    case: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = F32
    clip: float | None = None
    scale: float | None = None
    places: int = 3

    def worlds(self, *sides: Side) -> Worlds:
        """On a CPU, and on sides of the card; the first parameter has five pages, and is large enough for 8 bits."""
        case = CASES[self.case]
        if self.options:
            case = dataclasses.replace(case, theirs=None)
        here = [RESIDENT, *(dataclasses.replace(side, device="cuda") for side in sides)]
        here = [dataclasses.replace(side, options={**(side.options or {}), **self.options}) for side in here]

        def make(device: str) -> list[Any]:
            return [parameter(shape, i, device, self.dtype) for i, shape in enumerate(((70, 59), *SHAPES))]

        return Worlds(case, *here, make=make, clip=self.clip, scale=self.scale)


KINDS = {
    "plain": Kind(places=7),
    "clipped": Kind(clip=0.5, places=4),
    "scaled": Kind(scale=64.0, places=4),
    "clipped and scaled": Kind("amsgrad", clip=0.5, scale=64.0),
    "int8": Kind(options={"state_format": "int8"}, clip=0.5, scale=64.0),
    "int8, averaged": Kind(options={"state_format": "int8", "after": ema(0.9)}),
    "bfloat16+8": Kind(options={"param_format": "bfloat16+8", "state_format": "int8"}, dtype=BF16),
    "bfloat16+16": Kind(options={"param_format": "bfloat16+16", "fused": True}, dtype=BF16),
    "rounded by chance, averaged": Kind(
        options={"param_rounding": "stochastic", "fused": True, "after": ema(0.9)}, dtype=BF16
    ),
}
PLACES = (
    Side("visiting", share=0),
    Side("half", share=0.5),
    Side("in place", {"host_access": "in_place"}, 0),
    Side("by value", {"transport": "struct"}),
    Side("by memcpy", {"transport": "memcpy"}, 0),
    Side("mapped", {"transport": "mapped"}, 0),
    Side("host", {"placement": "host"}),
)
one_is_absent = absent(lambda step: (step % 6,) if step % 3 == 1 else ())


def before(w: World) -> None:
    """Gradients come and go, and a scaled one is not finite: nothing is updated."""
    one_is_absent(w)
    if w.count == 2 and w.scaler.is_enabled():
        w.params[0].grad.view(-1)[3] = float("nan")  # type: ignore[union-attr]


def unscaled(w: World) -> None:
    """A step that nobody scales, nor clips."""
    give(w.params, 50)
    clip, w.optimizer.max_grad_norm = getattr(w.optimizer, "max_grad_norm", None), None
    w.optimizer.step()
    w.optimizer.max_grad_norm = clip


def shown(w: World) -> None:
    """A step on averages, where there are some, as gradients."""
    if getattr(w.optimizer, "after", None) is not None:
        with w.optimizer.averaged():
            averages = [p.detach().clone() for p in w.params]
        for p, average in zip(w.params, averages, strict=True):
            p.grad = average
        w.optimizer.step()


@pytest.mark.parametrize(
    ("kind", "staged"), [("plain", "calls"), *((kind, "graph") for kind in KINDS)], indirect=["staged"]
)
@some_orders
def test_no_place_changes_a_bit(monkeypatch: pytest.MonkeyPatch, order: Order, kind: str, staged: str) -> None:
    with Card(monkeypatch, **order).playing():
        assert (
            not KINDS[kind]
            .worlds(*PLACES[: KINDS[kind].places])
            .step(4, before)
            .do(unscaled)
            .do(shown)
            .step(2, before)
            .over
        )


ACTS = acts_of("adamw")
#: On a card other devices are other ones, or memory of the card cannot be played so.
UNPLAYED = ("exp_avg: other device", "exp_avg_sq: other device", "exp_avg: resize_(0)", "exp_avg_sq: resize_(0)",
            "capturable")  # fmt: skip
OFTEN = ("clones", "swap entries", "exp_avg: set_", "step: data", "prune", "load", "deepcopy", "unspill")


@pytest.mark.parametrize("name", long_but([name for name in ACTS if name not in UNPLAYED], OFTEN.__contains__))
def test_an_act_between_steps(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Judged as all acts are: by torch, and by the bits of a CPU."""
    with Card(monkeypatch, first=(3, 2, 1, 0)).playing():
        Kind().worlds(PLACES[0]).step(3).do(ACTS[name], name).step(3)


# --- streams ----------------------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("options", [{}, {"transport": "memcpy"}, {"max_grad_norm": 1.0}], ids=str)
@played(some_orders)
def test_a_second_main_stream(run: Run, options: dict[str, Any]) -> Ends:
    """Steps go to one and the other, each behind the one before; the last optimizer ends in flight."""
    params, streams = run.params(SIZES), [None, run.stream()]
    optimizer = run.adamw(params, device_budget="16KiB", **options)
    for number in range(6):
        now, before = streams[number % 2], streams[(number + 1) % 2]
        run.wait(now, before)
        with run.on(now):
            run.step(params, optimizer)
        if number == 3:
            optimizer = run.adamw(params, device_budget="16KiB", **options)
    del optimizer
    run.wait(None, streams[1])
    return [p.detach().cpu() for p in params]


@both_ways
@played(some_orders)
def test_parameters_of_one_page_on_streams_of_their_own(run: Run) -> Ends:
    """A step updates one or the other, and its stream does not wait for the other's."""
    params, streams = run.params((300, 200)), [run.stream(), run.stream()]
    optimizer = run.adamw(params, device_budget=0)
    run.step(params, optimizer)
    for stream in streams:
        run.wait(stream, None)
    for number in range(4):
        params[1 - number % 2].grad = None
        with run.on(streams[number % 2]):
            run.step([params[number % 2]], optimizer)
    for stream in streams:
        run.wait(None, stream)
    return ends_of(params, optimizer)


@both_ways
@pytest.mark.parametrize("transport", ["managed", "memcpy"])
@played(some_orders)
def test_two_optimizers_share_a_ring(run: Run, transport: str) -> Ends:
    """Each on a stream of its own, and nobody waits for the other."""
    lists, streams = [run.params(SIZES), run.params(SIZES)], [run.stream(), run.stream()]
    optimizers = [run.adamw(params, device_budget=0, transport=transport) for params in lists]
    for stream in streams:
        run.wait(stream, None)
    for _ in range(3):
        for params, optimizer, stream in zip(lists, optimizers, streams, strict=True):
            with run.on(stream):
                run.step(params, optimizer)
    for stream in streams:
        run.wait(None, stream)
    return [*ends_of(lists[0], optimizers[0]), *ends_of(lists[1], optimizers[1])]


@both_ways
@pytest.mark.parametrize("placement", ["mapped", "managed"])
@played(some_orders)
def test_pages_move_between_steps(run: Run, placement: str) -> Ends:
    """Steps are on a stream that the one of the moves does not wait for."""
    params, other = run.params(SIZES), run.stream()
    optimizer = run.adamw(params, device_budget="100%", placement=placement)
    run.wait(other, None)
    for budget in (0, "24KiB", "100%", "spill", "unspill"):
        with run.on(other):
            run.step(params, optimizer)
        if budget in ("spill", "unspill"):
            getattr(optimizer, budget)()
        else:
            optimizer.set_device_budget(budget)
    return ends_of(params, optimizer)


@both_ways
@pytest.mark.parametrize(
    "options", [{"device_budget": "16KiB"}, {"device_budget": "100%", "placement": "mapped"}], ids=str
)
@played(some_orders)
def test_state_is_dropped_in_flight(run: Run, options: dict[str, Any]) -> Ends:
    params, other = run.params(SIZES), run.stream()
    run.wait(other, None)
    with run.on(other):
        for _ in range(2):
            optimizer = run.adamw(params, **options)
            for _ in range(2):
                run.step(params, optimizer)
            if "placement" in options:
                optimizer.state.clear()  # in front of tables, whose end waits for the device
            del optimizer
    run.wait(None, other)
    return [p.detach().cpu() for p in params]
