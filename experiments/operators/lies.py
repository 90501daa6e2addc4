"""Who catches an operator that lies to torch: opcheck, a compiler, gradcheck, or nobody?

Answer: see notes/custom_op.md.

Seven operators.  Each is checked by ``torch.library.opcheck``, called in an eager function
and in the same compiled, and its gradient by ``torch.autograd.gradcheck``.  *Wrong* is a result that is not the right
one, without an error; *caught* is an error before a wrong result is used.  Each lie has a process of its own.
"""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch

from experiments.lab import Page, Row, Rows, Run
from experiments.works.fresh import fresh

# --- operators that tell torch something that is not so, each beside what it ought to do, and a function that shows it

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Lie:
    """An operator that lies.

    Attributes:
        schema: its arguments and result.
        run: what it does.
        fake: what it says without values.
        use: a function of the operator and a tensor, whose eager result is the right one but for ``honest``.
        honest: the right result of ``use``, where even an eager call gives another.
        backward: its gradient, if it says one.
        elsewhere: whether it is registered for the other kind of device alone.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    use: Callable[[Any, torch.Tensor], torch.Tensor]
    honest: Callable[[torch.Tensor], torch.Tensor] | None = None
    backward: Callable[..., Any] | None = None
    elsewhere: bool = False


def writes_in_secret(x: torch.Tensor) -> torch.Tensor:
    """Twice the tensor; and the tensor becomes zero."""
    out = x * 2
    x.zero_()
    return out


def after_secret(op: Any, x: torch.Tensor) -> torch.Tensor:
    """Twice a tensor that the function has made, and what is left of it."""
    y = x + 1
    return op(y) + y


#: What the operator that writes elsewhere remembers.
own: dict[str, torch.Tensor] = {}


def writes_its_own(x: torch.Tensor) -> None:
    """Double what was remembered, and not what is handed: the same memory, as long as nobody hands a clone."""
    own.get("x", x).mul_(2)


def remembered(op: Any, x: torch.Tensor) -> torch.Tensor:
    """A tensor, doubled where it lies; eager calls remember it."""
    if not torch.compiler.is_compiling():
        own["x"] = x
    op(x)
    return x + 0


def halved(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """Half of the right gradient."""
    return grad


def gradient(op: Any, x: torch.Tensor) -> torch.Tensor:
    """Of the sum of what the operator gives."""
    x = x.detach().clone().requires_grad_()
    op(x).sum().backward()
    assert x.grad is not None
    return x.grad


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Twice the tensor."""
    return x * 2


PURE = "(Tensor x) -> Tensor"
SECRET, OWN, SHAPE, DTYPE, ALIAS, DEVICE, GRADIENT = (
    "it writes what it does not say", "it writes its own tensor, not the one handed", "its fake has another shape",
    "its fake has another dtype", "it returns its argument", "it is not registered for this device",
    "its gradient is half of what it should be",
)  # fmt: skip
LIES: Mapping[str, Lie] = {
    SECRET: Lie(PURE, writes_in_secret, torch.empty_like, after_secret),
    OWN: Lie("(Tensor(a!) x) -> ()", writes_its_own, lambda x: None, remembered, lambda x: x * 2),
    SHAPE: Lie(PURE, doubled, lambda x: x.new_empty(x.numel() // 2), lambda op, x: op(x) + 1),
    DTYPE: Lie(PURE, doubled, lambda x: torch.empty_like(x, dtype=torch.float64), lambda op, x: op(x) + 1),
    ALIAS: Lie(PURE, lambda x: x, torch.empty_like, lambda op, x: op(x + 1).mul_(2) + 1),
    DEVICE: Lie(PURE, doubled, torch.empty_like, lambda op, x: op(x) + 1, doubled, elsewhere=True),
    GRADIENT: Lie(PURE, doubled, torch.empty_like, gradient, lambda x: torch.full_like(x, 2), halved),
}
_libraries: list[torch.library.Library] = []


@functools.cache
def registered(name: str, device: str) -> Any:
    """The operator of a lie, for the kind of device."""
    lie, number = LIES[name], [*LIES].index(name)
    lib = torch.library.Library("lies", "FRAGMENT")
    _libraries.append(lib)
    lib.define(f"lie_{number}{lie.schema}")
    other = "CPU" if device == "cuda" else "CUDA"
    lib.impl(f"lie_{number}", lie.run, other if lie.elsewhere else device.upper())
    torch.library.register_fake(f"lies::lie_{number}", lie.fake, lib=lib)
    if lie.backward:
        torch.library.register_autograd(f"lies::lie_{number}", lie.backward, lib=lib)
    return getattr(torch.ops.lies, f"lie_{number}").default


# --- the question

# --- what opcheck, eager calls, gradcheck and compilers say to an operator that lies

RIGHT, WRONG, CAUGHT = "right", "wrong", "caught"


def judged(call: Callable[[], torch.Tensor], want: torch.Tensor) -> tuple[str, str]:
    """Whether a result is right, wrong, or an error; and the error."""
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            got = call()
    except Exception as error:  # a compiler's may be anything
        return CAUGHT, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
    same = got.shape == want.shape and got.dtype == want.dtype and torch.allclose(got, want)
    return (RIGHT if same else WRONG), ""


def compiled(name: str, device: torch.device, backend: str) -> tuple[str, str]:
    """What becomes of the function that shows a lie, compiled."""
    lie, op = LIES[name], registered(name, device.type)
    x = torch.linspace(1, 2, 8, device=device)
    want = lie.honest(x) if lie.honest else lie.use(op, x.clone())
    torch._dynamo.reset()
    given = own["x"] = x.clone()
    function = torch.compile(lambda x: lie.use(op, x), backend=backend)
    return judged(lambda: function(given), want)


def checked(name: str, device: torch.device) -> Row:
    """What opcheck, an eager call and gradcheck say to a lie."""
    lie, op = LIES[name], registered(name, device.type)
    x = torch.linspace(1, 2, 8, device=device)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own.clear()
        given = x.clone().requires_grad_() if lie.backward else x.clone()
        verdicts = torch.library.opcheck(op, (given,), raise_exception=False)
        double = x.double().requires_grad_()
        slope = lie.backward is not None and not torch.autograd.gradcheck(op, (double,), raise_exception=False)
    want = lie.honest(x) if lie.honest else lie.use(op, x.clone())
    eager, said = judged(lambda: lie.use(op, x.clone()), want)
    failed = [test for test, verdict in verdicts.items() if verdict != "SUCCESS"]
    return {"opcheck": ", ".join(failed), "eager": eager, "gradcheck": slope, "said": said}


# --- the question

DIED, NOBODY = "the process died", "nobody"
LIMIT = 300


def of_lie(name: str, device: str, backends: list[str]) -> Iterator[Row]:
    """A row, and the same again with each backend: a lie may end the process."""
    where = torch.device(device)
    row = {"lie": name, "device": where.type, **checked(name, where)}
    yield row
    for backend in backends:
        found, said = compiled(name, where, backend)
        row = {**row, backend: found, "said": row["said"] or said}
        yield row


def measure(run: Run) -> Iterator[Row]:
    """A row per lie; each is told in a process of its own."""
    for name in run.each(LIES):
        if run.quick:
            yield [*of_lie(name, str(run.device), ["aot_eager"])][-1]
            continue
        done = fresh(of_lie, name, str(run.device), ["aot_eager", "inductor"], limit=LIMIT)
        died = {"inductor": DIED, "said": done.ended.strip().splitlines()[-1]} if done.ended else {}
        yield {**done.rows[-1], **died}


def derive(rows: Rows) -> Rows:
    """Who catches it."""
    found = Rows()
    for row in rows:
        by = ["opcheck"] * bool(row["opcheck"]) + ["gradcheck"] * row["gradcheck"]
        compilers = [name for name in ("aot_eager", "inductor") if row.get(name) == CAUGHT]
        by += compilers + ["the call"] * (row["eager"] == CAUGHT)
        found.append(
            {**row, "caught": ", ".join(by) or NOBODY, "unseen": int(not by), "by_opcheck": bool(row["opcheck"])}
        )
    return found


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("operators that lie, on {device}", rows,
        {"the lie": "lie", "opcheck: what fails": "opcheck", "eager": "eager", "aot_eager": "aot_eager",
        "inductor": lambda row: row.get("inductor", ""), "caught by": "caught", "in words": "said"})  # fmt: skip
    page.bar("lies that somebody catches", rows, lambda rows: sum(not row["unseen"] for row in rows), at_least=4)
    page.bar("lies that opcheck catches", rows, lambda rows: sum(row["by_opcheck"] for row in rows), at_least=3)
