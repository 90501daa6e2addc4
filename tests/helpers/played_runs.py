"""Runs of optimizers that are played on a card, under several orders of its streams, and carried out on a CPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from often import long_but
from played_card import Card
from played_torch import CUDA, Stream

from pagedopt import PagedAdamW

Order = dict[str, Any]
#: Runs a test in all orders of the first three streams, and with everything as early as possible.
every_order = pytest.mark.parametrize(
    "order", [*({"first": each} for each in itertools.permutations(range(3))), {"early": True}], ids=str
)
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

    def gradients(self, params: Iterable[torch.nn.Parameter]) -> None:
        for p in params:
            p.grad = self.numbers(*p.shape).to(p.dtype)

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


def play(monkeypatch: pytest.MonkeyPatch, act: Callable[[Run], Ends], order: Order) -> None:
    """Play a run under one order of streams: nothing is out of order, and it ends in the bits of the CPU's."""
    with Card(monkeypatch, **order).playing() as card:
        played = act(Run(card))
    for number, (ours, theirs) in enumerate(zip(played, act(Run(None)), strict=True)):
        assert torch.equal(ours, theirs), f"result {number} is not that of the CPU"
