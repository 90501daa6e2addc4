"""Tests of steps that run in both looks: the compiled one, where it works, and Python's."""

from __future__ import annotations

import pytest

from pagedopt.system import look as build

ABSENT = not build.is_wanted() or build.compiled_look(wait=True) is None
#: For tests of the compiled look alone.
compiled_alone = pytest.mark.skipif(ABSENT, reason="no compiled look here")


@pytest.fixture(params=["compiled", "python"])
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The look of optimizers that the test makes."""
    if request.param == "python":
        monkeypatch.setenv(build.VARIABLE, "python")
    elif ABSENT:
        pytest.skip("no compiled look here")
    found: str = request.param
    return found
