"""Where hooks are not called (code of a compiler, scripts, traces) steps are plain, or it is said what to do."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from often import long_but
from overlapped import Loop, equal, linears, run
from torch import Tensor, nn

from tests.optim.overlapped_loops import UNSEEN

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore"),
]
TRACED = "a compiler has traced the model, and its code calls no hooks"


def compiled(what: Any, **options: Any) -> Any:
    return torch.compile(what, backend="eager", **options)


def compiling(call: Callable[[Any], Any], after: int = 0, **options: Any) -> Loop:
    """A loop that calls what ``call`` makes of the model, from some step on."""

    def forward(loop: Loop, x: Tensor) -> Tensor:
        if loop.number >= after:
            loop.tool = loop.tool or call(loop.models[0])
        y: Tensor = (loop.tool or loop.models[0])(x)
        return y

    return Loop(forward=forward, hides=False, **options)


def in_place(net: Any) -> Any:
    net.compile(backend="eager")
    return net


def blocks(net: Any) -> Any:
    """Whole graphs can be made in the recorded forward: recorders stand aside."""
    for layer in net[::2]:
        layer.compile(backend="eager", fullgraph=True)
    return net


CALLS: dict[str, Callable[[Any], Any]] = {
    "fullgraph": lambda net: compiled(net, fullgraph=True), "whole": compiled, "itself": in_place,
    "function": lambda net: compiled(lambda x: net(x) * 1.0),
}  # fmt: skip


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("name", long_but(CALLS, lambda name: name == "fullgraph"))
def test_compiled_behind_attach(name: str, after: int) -> None:
    """The tracer says so; from then on steps are plain."""
    ended = equal(compiling(CALLS[name], after), 5, watch=False)
    assert ended.plain[TRACED] >= 2
    assert (ended.hidden > 0) == (after > 0)


@pytest.mark.parametrize("after", [0, 3])
def test_blocks_compiled_one_by_one(after: int) -> None:
    """At once, or when nothing is queued."""
    loop = compiling(blocks, after, before=lambda loop: loop.opts[0].wait() if loop.number == after else None)
    ended = equal(loop, 6, watch=False)
    assert ended.hidden > ended.pages
    assert not ended.plain


@pytest.mark.long
@pytest.mark.parametrize("name", ["whole", "itself"])
def test_compiled_before_attach(name: str) -> None:
    """Its modules wait as a whole."""

    def make(width: int) -> list[nn.Module]:
        net = linears(width)
        return [in_place(net) if name == "itself" else nn.Sequential(*(compiled(each) for each in net))]

    assert not equal(Loop(make), 4, watch=False).plain


@pytest.mark.long
def test_compiled_and_run_before_attach() -> None:
    """Its code calls no hooks: no step is queued."""
    code: list[Any] = []

    def make(width: int) -> list[nn.Module]:
        net = linears(width)
        code[:] = [compiled(net)]
        code[0](torch.ones(4, width)).sum().backward()
        net.zero_grad()
        return [net]

    assert equal(compiling(lambda net: code[0], make=make), 4, watch=False).plain == {UNSEEN: 4}


@pytest.mark.long
def test_code_that_is_reused_is_found() -> None:
    """Dynamo guards no hooks: a second model of a class runs the code that it made of the first.  Never silently."""
    compiled(linears(40))(torch.ones(4, 40)).sum().backward()
    made = compiling(compiled, after=2).start(True, 2)
    try:
        made.train(3)
    except RuntimeError as error:
        if "before it was waited for" not in str(error):
            raise
    else:
        assert made.opts[0].overlap_report().plain[TRACED]


class Shift(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Block(nn.Module):
    """Owns no parameter that is trained; the module within does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.net = Shift(width), nn.Linear(width, width)
        self.net.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shift(self.net(x))
        return y


class Logged(nn.Module):
    """Calls its blocks through two more functions, once it is told to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks, self.logged = nn.ModuleList(Block(width) for _ in range(30)), False
        self.pad = nn.Parameter(torch.zeros(60))
        for block in self.blocks[:3]:
            block.compile(backend="eager")

    def timed(self, block: nn.Module, x: Tensor) -> Any:
        return self.call(block, x)

    def call(self, block: nn.Module, x: Tensor) -> Any:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.timed(block, x) if self.logged else block(x)
        return x + self.pad[: x.shape[-1]]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7),
    reason="torch 2.6 ends the process where more than eight equal blocks are compiled, before this change, too",
)
def test_blocks_are_compiled_once_their_needs_are_known() -> None:
    """A call of a compiled block is as deep in the stack as one that was not, if its caller's is two deeper."""

    def before(loop: Loop) -> None:
        if loop.number == 4:
            model: Any = loop.models[0]
            model.logged = True
            for block in model.blocks[3:]:
                block.compile(backend="eager")

    def make(width: int) -> list[nn.Module]:
        torch._dynamo.reset()
        return [Logged(width)]

    loop = Loop(make, before=before)
    assert run(loop, True, 7).same(run(loop, False, 7))


def test_trace_and_export() -> None:
    """Both see the model's own forward, updated."""
    made = Loop().start(True, 3)
    x, (net,) = made.batch(), made.models
    traced = torch.jit.trace(net, x)
    made.start(False, 3)
    assert torch.equal(traced(x), made.models[0](x))

    made.start(True, 3)
    program = torch.export.export(made.models[0], (x,))
    assert torch.equal(program.module()(x), traced(x))


def test_script_is_refused() -> None:
    made = Loop().start(True)
    with pytest.raises(Exception, match=r"call optimizer\.detach\(\) first"):
        torch.jit.script(made.models[0])
    made.opts[0].detach()
    torch.jit.save(torch.jit.script(made.models[0]), io.BytesIO())
