"""Where hooks are not called (code of a compiler, scripts, traces) steps are plain, or it is said what to do."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from often import long_but
from overlapped import Ended, Loop, agree, linears, run
from torch import Tensor, nn

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]
TRACED = "a compiler has traced the model, and its code calls no hooks"
UNSEEN = (
    "no forward of an attached model was seen since the last step; attach() the modules that are called, for hooks see "
    "no other method of a model"
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(what: Any, **options: Any) -> Any:
    return torch.compile(what, backend="eager", **options)


class Compiling(Loop):
    """A loop that calls what ``call`` makes of the model."""

    call: Callable[[nn.Module], Callable[[Tensor], Tensor]]
    after: int = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.number < self.after:
            y: Tensor = self.models[0](x)
            return y
        if self.tool is None:
            self.tool = self.call(self.models[0])
        z: Tensor = self.tool(x)
        return z


def loop(call: Callable[[nn.Module], Callable[[Tensor], Tensor]], after: int = 0) -> Loop:
    made = Compiling()
    made.call, made.after = call, after
    return made


def ends(call: Callable[[nn.Module], Callable[[Tensor], Tensor]], after: int, hidden: bool = False) -> Ended:
    queued = run(loop(call, after), True, 5, watch=False)
    return agree(queued, run(loop(call, after), False, 5), hidden)


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


def blocks(net: nn.Module) -> nn.Module:
    assert isinstance(net, nn.Sequential)
    for i in range(0, len(net), 2):
        if not isinstance(net[i], torch._dynamo.OptimizedModule):
            net[i].compile(backend="eager")
    return net


def wrapped(net: nn.Module) -> nn.Module:
    assert isinstance(net, nn.Sequential)
    for i in range(0, len(net), 2):
        net[i] = compiled(net[i])
    return net


def function(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return compiled(lambda x: net(x) * 1.0)  # type: ignore[no-any-return]


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "fullgraph": lambda net: compiled(net, fullgraph=True), "whole": compiled, "function": function, "itself": in_place,
}  # fmt: skip


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("name", long_but(CALLS, lambda name: name == "fullgraph"))
def test_compiled_behind_attach(name: str, after: int) -> None:
    """The tracer says so; from then on steps are plain."""
    ended = ends(CALLS[name], after)
    assert ended.plain[TRACED] >= 2
    assert (ended.hidden > 0) == (after > 0)


def test_blocks_compiled_one_by_one() -> None:
    assert not ends(blocks, 0, hidden=True).plain


@pytest.mark.long
@pytest.mark.parametrize("compiling", [in_place, wrapped])
def test_compiled_before_attach(compiling: Callable[[nn.Module], nn.Module]) -> None:
    """A module waits as a whole."""
    queued = run(Loop(lambda width: [compiling(linears(width))]), True, 4, watch=False)
    assert not agree(queued, run(Loop(), False, 4)).plain


@pytest.mark.long
def test_compiled_and_run_before_attach() -> None:
    """Its code calls no hooks: no step is queued."""
    call: Callable[[nn.Module], Any] = CALLS["whole"]

    def make(width: int) -> list[nn.Module]:
        net = linears(width)
        made.tool_of_all = call(net)  # type: ignore[attr-defined]
        made.tool_of_all(torch.ones(4, width)).sum().backward()  # type: ignore[attr-defined]
        net.zero_grad()
        return [net]

    made = Compiling(make)
    made.call = lambda net: made.tool_of_all  # type: ignore[attr-defined]
    queued = run(made, True, 4, watch=False)
    agree(queued, run(made, False, 4), hidden=False)
    assert queued.plain == {UNSEEN: 4}


@pytest.mark.long
def test_code_that_is_reused_is_found() -> None:
    """Dynamo guards no hooks: a second model of a class runs the code that it made of the first.  Never silently."""
    first = linears(40)
    compiled(first)(torch.ones(4, 40)).sum().backward()
    made = loop(CALLS["whole"], after=2)
    made.start(True)
    made.train(2)
    try:
        made.train(3)
    except RuntimeError as error:
        if "before it was waited for" not in str(error):
            raise
    else:
        assert made.opts[0].overlap_report().plain[TRACED]


def test_trace_and_export() -> None:
    """Both see the model's own forward, updated."""
    made = Loop(lambda width: [linears(width)])
    made.start(True)
    made.train(3)
    x, (net,) = made.batch(), made.models
    traced = torch.jit.trace(net, x)
    made.start(False)
    made.train(3)
    assert torch.equal(traced(x), made.models[0](x))

    made.start(True)
    made.train(3)
    program = torch.export.export(made.models[0], (x,))
    assert torch.equal(program.module()(x), traced(x))


def test_script_is_refused() -> None:
    made = Loop(lambda width: [linears(width)])
    made.start(True)
    with pytest.raises(Exception, match=r"call optimizer\.detach\(\) first"):
        torch.jit.script(made.models[0])
    made.opts[0].detach()
    torch.jit.save(torch.jit.script(made.models[0]), io.BytesIO())


# --- what an adversary found: programs as users write them, in which attached steps had other numbers or failed -------
