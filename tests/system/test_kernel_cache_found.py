"""What is found in the kernel cache is not believed: it is ours alone and whole, or made anew."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import nvrtc_support
import pytest
import torch
from cache_support import DAMAGE, NOBODY, RIGHT, Used, as_root, files, in_child, own, plant, use
from command_line import assert_has
from kernel_names import instance
from often import MARKS

from pagedopt import multi_tensor_apply
from pagedopt.kernels import nvrtc, source
from pagedopt.rules import RULES, Rule


@as_root
def test_what_others_planted_is_not_run(place: Path) -> None:
    """Somebody wrote into the folder while it was open: over every file there is, and under every name it had."""
    cache, mark = place / "cache", place / "mark"
    assert in_child(use) == Used(RIGHT, [])
    cache.chmod(0o777)
    evil = f"import os\nos.close(os.open({str(mark)!r}, os.O_CREAT))\n"

    class Evil:
        def __reduce__(self) -> Any:
            return exec, (evil,)

    for path in list(files(cache)):
        path.unlink()
        plant(path, evil.encode() if path.suffix == ".py" else pickle.dumps(Evil()))
        os.chown(path, NOBODY, NOBODY)
    values, (told,) = in_child(use)
    assert not mark.exists(), "a planted file was run"
    assert values == RIGHT
    assert f"belongs to user {NOBODY}" in told
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert all(p.stat().st_uid == os.geteuid() for p in files(cache))
    assert in_child(use) == Used(RIGHT, [])


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_made_anew_with_one_warning(place: Path, damage: Callable[[Path], None]) -> None:
    assert in_child(use) == Used(RIGHT, [])
    before = files(place / "cache")
    for path in before:
        damage(path)
    values, (told,) = in_child(use)
    assert values == RIGHT
    assert_has(told, str(place / "cache"), "compiled anew")
    assert in_child(use) == Used(RIGHT, []), "it was not kept"
    assert {p for p in files(place / "cache") if p.suffix != ".was"} == set(before)


@as_root
def test_an_unreadable_file_is_made_anew(place: Path) -> None:
    own(place / "cache", NOBODY)
    assert in_child(use, NOBODY) == Used(RIGHT, [])
    for path in files(place / "cache"):
        path.chmod(0)
    values, (told,) = in_child(use, NOBODY)
    assert values == RIGHT
    assert "Permission denied" in told
    assert in_child(use, NOBODY) == Used(RIGHT, [])


def test_a_file_under_another_name_is_damaged(place: Path) -> None:
    def other() -> None:
        multi_tensor_apply(Rule(RULES["square_root"].function), [[torch.ones(2)]])

    in_child(use)
    (mine,) = files(place / "cache")
    in_child(other)
    (others,) = set(files(place / "cache")) - {mine}
    shutil.copy(others, mine)
    values, (told,) = in_child(use)
    assert values == RIGHT
    assert "damaged" in told


def test_a_folder_in_the_place_of_a_file_is_no_error(place: Path) -> None:
    in_child(use)
    (path,) = files(place / "cache")
    path.unlink()
    (path / "full").mkdir(parents=True)
    assert in_child(use).values == RIGHT


def test_processes_that_start_together_share_a_folder(place: Path) -> None:
    """Some compile, some find; one that finds a file finds all of it."""
    children = []
    for _ in range(6):
        if (child := os.fork()) == 0:
            try:
                well = all(use() == Used(RIGHT, []) for _ in range(3))
            except BaseException:
                well = False
            os._exit(0 if well else 1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 6
    assert len(files(place / "cache")) == 1, "a temporary file was left"


# ---- what NVRTC compiles ----

#: Makes or finds one, and a symbol in it.
Cubin = Callable[[], tuple[bytes, str]]


@pytest.fixture
def cubin(place: Path) -> Cubin:
    nvrtc_support.nvrtc()
    rule = RULES["add_scalar"]
    name = instance(rule, (torch.float32,), 512, "TableAt")
    return lambda: nvrtc.cached_cubin(source.text(rule), name, "sm_90")


class Got(NamedTuple):
    """A cubin, and whether it was compiled now."""

    data: bytes
    symbol: str
    compiled: bool
    warnings: list[str]


def get(cubin: Cubin) -> Got:
    """In a child, as kernels are looked for once in a process."""

    def work() -> Got:
        compile_cuda, compiled = nvrtc.compile_cuda, []
        nvrtc.compile_cuda = lambda *a: compiled.append(a) or compile_cuda(*a)  # type: ignore[func-returns-value]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            data, symbol = cubin()
        return Got(data, symbol, bool(compiled), [str(w.message) for w in told])

    got: Got = in_child(work)
    assert got.data[:4] == b"\x7fELF"
    assert got.symbol.encode() in got.data
    return got


#: Every damage is done to a file of Numba's, too.
SOME = [pytest.param(damage, id=name, marks=MARKS[i % 2 == 0]) for i, (name, damage) in enumerate(DAMAGE.items())]


@pytest.mark.parametrize("damage", SOME)
def test_a_damaged_cubin_is_made_anew_with_one_warning(
    place: Path, cubin: Cubin, damage: Callable[[Path], None]
) -> None:
    first, again = get(cubin), get(cubin)
    assert (first.compiled, first.warnings) == (True, [])
    assert again == first._replace(compiled=False)
    (path,) = files(place / "cache")
    assert path.suffix == ".cubin"
    damage(path)
    after = get(cubin)
    assert after == first._replace(warnings=after.warnings)
    assert len(after.warnings) == 1
    assert get(cubin) == again, "it was not kept"


def test_a_cubin_that_a_cleaner_took_is_made_anew(place: Path, cubin: Cubin) -> None:
    first = get(cubin)
    (path,) = (place / "cache").glob("*.cubin")
    path.unlink()
    assert get(cubin) == first


def write_protect(place: Path) -> None:
    (place / "cache").mkdir()
    (place / "cache").chmod(0o1777)


def test_there_is_a_cubin_even_where_nothing_can_be_written(place: Path, cubin: Cubin) -> None:
    write_protect(place)
    got = get(cubin)
    (told,) = got.warnings
    assert "PAGEDOPT_CACHE_DIR" in told
    assert (got.compiled, files(place / "cache")) == (True, {})


def test_kernels_that_cannot_be_kept_hold_no_descriptors(place: Path) -> None:
    """However many: ``select.select`` takes none above 1,023, and many systems allow no more."""
    write_protect(place)

    def held_by_fifty() -> int:
        nvrtc.compile_cuda = lambda text, *_: (text.encode(), ["symbol"])
        nvrtc._nvrtc_version = lambda: "any"
        before = len(os.listdir("/proc/self/fd"))
        made = {nvrtc.cached_cubin(f"text {i}", "name", "sm_90") for i in range(50)}
        assert len(made) == 50
        return len(os.listdir("/proc/self/fd")) - before

    assert in_child(held_by_fifty) == 0
