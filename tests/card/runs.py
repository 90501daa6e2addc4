"""Runs of optimizers that are played on a card, under several orders of its streams, and carried out on a CPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from often import long_but
from torch import nn

from pagedopt import PagedAdamW
from tests.card.card import Card
from tests.card.driver import Result
from tests.card.tensors import CUDA, Stream

Order = dict[str, Any]
#: Runs a test with the main stream last, which waits for all others, and if there is time with others.
some_orders = pytest.mark.parametrize(
    "order",
    long_but(
        [{"first": (3, 2, 1, 0)}, {"first": (0, 1, 2, 3)}, {"early": True}],
        lambda order: 3 in order.get("first", ())[:1],
    ),
    ids=str,
)
Ends = list[torch.Tensor]
WIDTH = 40


class Run:
    """One run, on ``device``.  Streams are none on a CPU.

    Attributes:
        card: that is played; None on a CPU.
        generator: of all numbers.
    """

    def __init__(self, card: Card | None) -> None:
        self.card, self.device = card, torch.device("cpu") if card is None else CUDA
        self.generator = torch.Generator().manual_seed(1)

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def params(self, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(self.numbers(size).to(dtype)) for size in sizes]

    def adamw(self, params: Iterable[torch.nn.Parameter], **options: Any) -> PagedAdamW:
        """An optimizer; on a CPU its state, in whatever format, is where it is."""
        if self.card is None:
            away = ("placement", "device_budget", "host_access", "transport", "blocks", "preallocate", "capturable")
            options = {name: value for name, value in options.items() if name not in away}
        return PagedAdamW(params, lr=1e-2, weight_decay=0.1, **options)

    def net(self, count: int = 3, **options: Any) -> tuple[nn.Module, PagedAdamW]:
        """A model of so many layers, and its optimizer; they are attached on a card."""
        torch.default_generator.manual_seed(5)
        layers = [each for _ in range(count) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = nn.Sequential(*layers).to(self.device)
        optimizer = self.adamw(model.parameters(), device_budget=0, **options)
        self.attach(optimizer, model)
        return model, optimizer

    def attach(self, optimizer: Any, model: nn.Module, **how: Any) -> None:
        """Hide steps behind a model, on a card."""
        if self.card is not None:
            optimizer.attach(model, **how)

    def backward(self, model: nn.Module) -> torch.Tensor:
        """Of a loss on new numbers, which is returned."""
        loss: torch.Tensor = model(self.numbers(4, WIDTH)).square().mean()
        loss.backward()
        return loss.detach()

    @contextlib.contextmanager
    def refused(
        self, *names: str, error: Any = Result.CUDA_ERROR_OUT_OF_MEMORY, behind: str = "", once: bool = False
    ) -> Iterator[None]:
        """A block in which the card's driver refuses these calls, with an error or what it raises.

        Args:
            names: of the calls.
            error: the driver's, or what is raised.
            behind: only behind a call whose name has this in it.
            once: only the first of them.
        """
        seen, hits = list[str](), list[str]()

        def before(name: str) -> Any:
            seen.append(name)
            if name not in names or (once and hits) or not any(behind in each for each in seen):
                return None
            hits.append(name)
            if isinstance(error, BaseException):
                raise error
            return error

        self.before(before)
        try:
            yield
        finally:
            self.before(lambda name: None)
        assert hits or self.card is None, f"none of {names} was called"

    def before(self, act: Callable[[str], Any]) -> None:
        """Called with each call of the card's driver: may answer with an error, or raise."""
        if self.card is not None:
            self.card.driver.before = act

    @contextlib.contextmanager
    def calls(self) -> Iterator[Counter[str]]:
        """How often each function of the driver is called in the block; none on a CPU."""
        counts, all_calls = Counter[str](), [] if self.card is None else self.card.driver.calls
        first = len(all_calls)
        yield counts
        counts.update(all_calls[first:])

    def gradients(self, params: Iterable[torch.Tensor]) -> None:
        for p in params:
            p.grad = self.numbers(*p.shape).to(p.dtype)

    def step(self, params: Sequence[torch.Tensor], optimizer: Any, absent: Iterable[int] = ()) -> Counter[str]:
        """Take a step on new gradients, of which some are absent; return what the driver was called for."""
        self.gradients(params)
        for i in absent:
            params[i].grad = None
        with self.calls() as calls:
            optimizer.step()
        return calls

    def captured(self, optimizer: Any) -> Callable[[], object]:
        """Capture a step; return what replays it.  On a CPU that takes one."""
        if self.card is None:
            return optimizer.step  # type: ignore[no-any-return]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        return graph.replay

    def refresh(self, optimizer: Any) -> None:
        """Tell captured steps what has changed; on a CPU there are none."""
        if self.card is not None:
            optimizer.refresh()

    def stream(self) -> Any:
        return None if self.card is None else Stream()

    def on(self, stream: Any) -> Any:
        """A ``with`` block on a stream; None: the main one."""
        return contextlib.nullcontext() if self.card is None else torch.cuda.stream(stream or Stream(handle=0))

    def wait(self, stream: Any, other: Any) -> None:
        """Let a stream wait for another; None: the main one."""
        if self.card is not None:
            main = Stream(handle=0)
            (stream or main).wait_stream(other or main)


def ends_of(params: Iterable[torch.Tensor], optimizer: Any) -> Ends:
    """Copies of parameters and their state, without step counts, on the host."""
    params = list(params)
    state = [t for p in params for name, t in optimizer.state[p].items() if name != "step"]
    return [t.detach().cpu() for t in (*params, *state)]


def play(monkeypatch: pytest.MonkeyPatch, act: Callable[[Run], Ends | None], order: Order) -> None:
    """Play a run under one order of streams: nothing is out of order, and what it returns has the bits of a CPU."""
    with Card(monkeypatch, **order).playing() as card:
        played = act(Run(card))
    if played is None:
        return
    for number, (ours, theirs) in enumerate(zip(played, act(Run(None)), strict=True)):
        assert torch.equal(ours, theirs), f"result {number} is not that of the CPU"


def played(orders: Any = None, **order: Any) -> Callable[[Callable[..., Ends | None]], Callable[..., None]]:
    """Makes a test of a run's acts: :func:`play`, under each of ``orders``, or under this one.

    What the function takes beside its run are the test's arguments.
    """

    def make(act: Callable[..., Ends | None]) -> Callable[..., None]:
        of_act = inspect.signature(act).parameters

        @functools.wraps(act)
        def test(monkeypatch: pytest.MonkeyPatch, order: Order = order, **given: Any) -> None:
            if "monkeypatch" in of_act:
                given["monkeypatch"] = monkeypatch
            play(monkeypatch, functools.partial(act, **given), order)

        names = dict.fromkeys(("monkeypatch", *(["order"] if orders else []), *list(of_act)[1:]))
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        return orders(test) if orders else test

    return make
