"""The private parts that the compiled look uses: wrong ones are found, in a child process."""

from __future__ import annotations

from typing import Any

import pytest

from pagedopt.system.look import parts, self_test, words

pytestmark = pytest.mark.skipif(parts.compiled_look(wait=True) is None, reason="no compiled look here")


def changed(**others: str) -> parts.Look:
    look = parts.look_of_this_build()
    assert look is not None
    swapped = look.parts.copy()
    for name, other in others.items():
        swapped[getattr(words, name)] = look.parts[getattr(words, other)]
    return look._replace(parts=swapped)


def test_the_look_works() -> None:
    assert self_test.works(changed())


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("GET_STRIDES", "GET_SIZES"), ("IS_NEG", "IS_INFERENCE"), ("BUMP_VERSION", "IS_NEG"),
        ("GET_DTYPE", "GET_DEVICE_TYPE"), ("GET_DATA_PTR", "GET_DIM"), ("DICT", "LIST"), ("TENSOR", "LIST"),
        ("UNDEFINED", "STRIDED"),
    ],
)  # fmt: skip
def test_a_wrong_part_is_found(part: str, other: str) -> None:
    assert not self_test.works(changed(**{part: other}))


def test_a_missing_symbol_means_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts._OF_C10, "GRAD", "_ZNK3c1010TensorImpl4gradEw")
    parts._look_of_this_build.cache_clear()
    try:
        assert parts.look_of_this_build() is None
    finally:
        parts._look_of_this_build.cache_clear()


@pytest.mark.parametrize("executable", ["", None, "/opt/app/train", "/nowhere/python3"])
def test_what_is_no_interpreter_is_not_started(executable: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PAGEDOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parts.sys, "executable", executable)
    assert parts._Verdict().ask(wait=True) == parts._FAILS
    assert parts._cached() is None


def test_a_frozen_application_is_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PAGEDOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parts.sys, "frozen", True, raising=False)
    assert parts._Verdict().ask(wait=True) == parts._FAILS


@pytest.mark.parametrize(
    ("code", "verdict", "cached"),
    [
        ("import os; os._exit(0)", parts._WORKS, None),
        ("import os; os._exit(3)", parts._FAILS, None),
        ("import os; os.kill(os.getpid(), 11)", parts._FAILS, parts._FAILS),
        ("import os; os.kill(os.getpid(), 9)", parts._FAILS, None),
        ("raise SystemError", parts._FAILS, None),
    ],
)
def test_the_verdict_of_a_child(
    code: str, verdict: bytes, cached: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PAGEDOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parts, "_CODE", code)
    asked = parts._Verdict()
    assert asked.ask(wait=True) == verdict
    assert parts._cached() == cached
    if cached:
        assert parts._Verdict().ask(wait=False) == cached
