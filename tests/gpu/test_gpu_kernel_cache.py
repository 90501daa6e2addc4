"""Cubins on a GPU: from a folder, made anew where they are damaged, and from memory where nothing can be written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_support import halve
from gpu_support import launching

from pagedopt import multi_tensor_apply
from pagedopt.rules import Rule
from pagedopt.system import warn

pytestmark = launching()


def negate(x):  # type: ignore[no-untyped-def]
    return -x


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEDOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warn, "_said", set())


def check_both() -> None:
    """Rules that are new to this process: their kernels are looked for."""
    x = torch.arange(5000.0, device="cuda")
    for function in (halve, negate):
        multi_tensor_apply(Rule(function), [[x]])
    assert torch.equal(x.cpu(), -torch.arange(5000.0) / 2)


def test_damaged_cubins_are_made_anew_with_one_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    check_both()
    cubins = sorted((tmp_path / "cache").glob("*.cubin"))
    assert len(cubins) == 2
    assert not recwarn.list
    for path in cubins:
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.warns(RuntimeWarning, match="compiled anew") as told:
        check_both()
    assert len(told) == 1
    assert sorted((tmp_path / "cache").glob("*.cubin")) == cubins


def test_kernels_that_are_on_no_disk_run(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)  # as /tmp, so it is not used
    with pytest.warns(RuntimeWarning, match="PAGEDOPT_CACHE_DIR") as told:
        check_both()
    assert len(told) == 1
    assert not list((tmp_path / "cache").iterdir())
