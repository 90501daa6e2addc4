"""Tests of steps that run in both looks: the compiled one, where it works, and Python's."""

from __future__ import annotations

import pytest

from pagedopt.system.look import build


@pytest.fixture(params=["compiled", "python"])
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The look of optimizers that the test makes."""
    if request.param == "python":
        monkeypatch.setenv(build.VARIABLE, "python")
    elif build.compiled_look(wait=True) is None:
        pytest.skip("no compiled look here")
    found: str = request.param
    return found
