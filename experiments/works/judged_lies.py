"""What opcheck, eager calls, gradcheck and compilers say to an operator that lies."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout

import torch

from experiments.lab import Row
from experiments.works.planted_lies import LIES, own, registered

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
