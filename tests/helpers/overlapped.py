"""Toys whose update is queued, and the same steps taken at once: losses and weights are to be the same bits.

State is in small pages, so a small model has more than 50 of them.  On a CPU a queued launch is carried out by whoever
waits for it: a fence that is missing is a wrong number.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from optim_support import ADAMW
from torch import Tensor, nn

from pagedopt import PagedAdamW
from pagedopt.placements.file import FileArena
from pagedopt.placements.mapped import MappedArena

WIDTH, LAYERS = 40, 36
Models = list[nn.Module]


class SmallPages(FileArena):
    """Pages of 1,024 elements."""

    name = "file of small pages"
    granule = stretch = 4096


class SmallMappedPages(MappedArena):
    """Pages of the least size that a GPU maps: 2 MiB of each moment."""

    name = "mapped in small pages"
    stretch = MappedArena.granule


PLACES = {"cpu": SmallPages, "cuda": SmallMappedPages}
WIDE = {"cpu": WIDTH, "cuda": 1200}


def linears(width: int = WIDTH, layers: int = LAYERS) -> nn.Sequential:
    return nn.Sequential(*[each for _ in range(layers) for each in (nn.Linear(width, width), nn.Tanh())])


@dataclass
class Loop:
    """How a model is trained; each hook gets this and may do what users do.

    Attributes:
        make: the models; the first is called with data, the next with what it returns.
        forward: what a batch becomes.
        loss: of that.
        before, between, behind: called before a step's forward, between backward and step, and behind zero_grad.
        attach: the modules to attach.
        overlap: under what.
        options: of the optimizer.
        enough: steps after which all that is done has been hidden.
        hides: whether more than a step's pages are hidden then.
        plain: why steps are not queued, and how many.
        outside: parameters that are in no attached model in the end.
    """

    make: Callable[[int], Models] = lambda width: [linears(width)]
    forward: Callable[[Loop, Tensor], Tensor] = lambda loop, x: functools.reduce(lambda y, m: m(y), loop.models, x)
    loss: Callable[[Loop, Tensor], Tensor] = lambda loop, y: y.square().mean()
    before: Callable[[Loop], None] = lambda loop: None
    between: Callable[[Loop], None] = lambda loop: None
    behind: Callable[[Loop], None] = lambda loop: None
    optimizers: Callable[[Loop], list[Any]] = lambda loop: [loop.adamw(p for m in loop.models for p in m.parameters())]
    attach: Callable[[Loop], Iterable[nn.Module]] = lambda loop: loop.models
    step: Callable[[Loop, Callable[[], Tensor]], Tensor] | None = None
    micro: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    hook_plain: bool = False  # any hook turns a fast path of torch off
    data: tuple[int, ...] = (4,)
    device: str = "cpu"
    overlap: Literal["forward", "backward"] = "forward"
    enough: int = 3
    hides: bool = True
    plain: Mapping[str, int] = field(default_factory=dict)
    outside: int = 0
    # --- of a run
    attached: bool = field(default=False, init=False)
    number: int = field(default=0, init=False)
    models: Models = field(default_factory=list, init=False)
    opts: list[Any] = field(default_factory=list, init=False)
    tool: Any = field(default=None, init=False)
    more: list[float] = field(default_factory=list, init=False)  # what hooks have read

    def adamw(self, params: Iterable[nn.Parameter], **options: Any) -> PagedAdamW:
        away = {"placement": PLACES[self.device], "device_budget": 0}
        return PagedAdamW(params, **{**ADAMW, **away, **self.options, **options})

    def start(self, attached: bool, steps: int = 0) -> Self:
        """Make all of it anew, and train."""
        torch.manual_seed(5)
        self.attached, self.number, self.tool, self.more = attached, 0, None, []
        self.models = [m.to(self.device) for m in self.make(WIDE[self.device])]
        if self.hook_plain and not attached:
            for module in (module for m in self.models for module in m.modules()):
                module.register_forward_pre_hook(lambda *_: None)
        self.opts = self.optimizers(self)
        for opt in self.opts if attached else ():
            for model in self.attach(self):
                opt.attach(model, self.overlap)
        self.train(steps)
        return self

    def batch(self, of: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.number + of)
        return torch.randn(*self.data, WIDE[self.device], generator=generator).to(self.device)

    def gradients(self) -> Tensor:
        """Forward and backward of each part of a batch."""
        total = torch.zeros((), device=self.device)
        for of in range(self.micro):
            loss = self.loss(self, self.forward(self, self.batch(of))) / self.micro
            loss.backward()
            total = total + loss.detach()
        return total

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.before(self)
            if self.step is not None:
                losses.append(float(self.step(self, self.gradients)))
            else:
                losses.append(float(self.gradients()))
                self.between(self)
                for opt in self.opts:
                    opt.step()
                for opt in self.opts:
                    opt.zero_grad()
            self.behind(self)
            self.number += 1
        return losses

    def values(self) -> list[Tensor]:
        """Weights and state, after a wait."""
        for opt in self.opts:
            opt.wait()
        state = [value for opt in self.opts for entry in opt.state.values() for value in entry.values()]
        return [t.detach().clone() for t in [*(p for m in self.models for p in m.parameters()), *state]]

    def hidden(self) -> int:
        return sum(opt.overlap_report().hidden for opt in self.opts)

    def pages(self) -> int:
        return sum(arena.layout.pages for opt in self.opts for arena in opt.store.arenas)


@contextlib.contextmanager
def watched(loop: Loop, watch: bool = True) -> Iterator[None]:
    """Reads that pass no fence raise, in a block."""
    with contextlib.ExitStack() as stack:
        for opt in loop.opts if watch and loop.attached else ():
            stack.enter_context(opt.watch_reads())
        yield


@dataclass
class Ended:
    losses: list[float]
    values: list[Tensor]
    hidden: int
    pages: int
    plain: dict[str, int]
    outside: int

    def same(self, other: Ended) -> bool:
        return self.losses == other.losses and all(map(torch.equal, self.values, other.values))


def run(loop: Loop, attached: bool, steps: int | None = None, watch: bool = True) -> Ended:
    """Train from the start, once."""
    loop.start(attached)
    with watched(loop, watch):
        losses = loop.train(loop.enough if steps is None else steps)
    reports = [opt.overlap_report() for opt in loop.opts]
    plain = {why: count for report in reports for why, count in report.plain.items()}
    outside = sum(report.outside for report in reports)
    return Ended([*losses, *loop.more], loop.values(), loop.hidden(), loop.pages(), plain, outside)


def agree(queued: Ended, plain: Ended, hides: bool = True) -> Ended:
    """Both ended alike to the bit; something was hidden."""
    assert queued.losses == plain.losses
    assert all(map(torch.equal, queued.values, plain.values))
    assert queued.pages > 50
    assert not hides or queued.hidden > queued.pages
    return queued


def equal(loop: Loop, steps: int | None = None, watch: bool = True) -> Ended:
    """Train with steps that are queued, and with steps that are not; they agree."""
    return agree(run(loop, True, steps, watch), run(loop, False, steps), loop.hides)


def carriers() -> list[threading.Thread]:
    """The threads that carry pages."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("pagedopt-file")]
