"""Where kernels are kept between runs: in a folder of ours alone, or nowhere."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import kernel_texts
import pytest
import torch
from cache_support import DAMAGE, NOBODY, RIGHT, Used, as_root, files, in_child, modes, own, plant, use
from command_line import assert_has
from kernel_texts import instance
from often import MARKS

from pagedopt import multi_tensor_apply
from pagedopt.kernels import nvrtc, source
from pagedopt.rules import RULES, Rule


def test_a_second_process_finds_what_the_first_compiled(place: Path) -> None:
    assert in_child(use) == Used(RIGHT, [])
    before = files(place / "cache")
    assert before
    assert in_child(use) == Used(RIGHT, [])
    assert files(place / "cache") == before


@pytest.mark.parametrize("user", [None, pytest.param(NOBODY, marks=as_root)])
@pytest.mark.parametrize("umask", [0, 0o022, 0o777], ids=oct)
def test_what_we_make_is_for_us_alone_whatever_the_umask(place: Path, umask: int, user: int | None) -> None:
    home = own(place / "home", user or os.geteuid())
    where = home / "not" / "yet" / "there"
    for _ in range(2):
        assert in_child(use, user, umask, PAGEDOPT_CACHE_DIR=str(where)) == Used(RIGHT, [])
    found = modes(home / "not")
    assert len(found) >= 4
    for name, mode in found.items():
        assert mode & 0o677 == 0o600, f"{name} has mode {mode:o}"


#: What to set, by what is wrong with it.
USELESS = {
    "no home": {"HOME": "/dev/null"},
    "home of no use": {"HOME": "/proc"},  # nothing can be made there, by root neither
    "no XDG": {"XDG_CACHE_HOME": "/dev/null"},
    "read-only": {"PAGEDOPT_CACHE_DIR": "/proc/cache"},
    "path too long": {"PAGEDOPT_CACHE_DIR": "/" + "/".join(["a" * 200] * 30)},
}


@pytest.mark.parametrize("environment", USELESS.values(), ids=USELESS)
def test_where_nothing_can_be_kept_there_is_one_warning(place: Path, environment: dict[str, str]) -> None:
    def twice() -> tuple[Used, Used]:
        return use(), use()

    unset = {"PAGEDOPT_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
    first, second = in_child(twice, **{**unset, **environment})
    assert first.values == second.values == RIGHT
    (told,) = first.warnings
    assert_has(told, "every process compiles its own", "PAGEDOPT_CACHE_DIR")
    assert second.warnings == []
    assert not list((place / "tmp").iterdir())


@as_root
@pytest.mark.parametrize("user", [NOBODY, 0], ids=["nobody", "root"])
def test_a_folder_of_somebody_else_is_not_used(place: Path, user: int) -> None:
    """Though we could write to it."""
    cache = own(place / "cache", NOBODY + 1)
    cache.chmod(0o777)
    values, (told,) = in_child(use, user)
    assert values == RIGHT
    assert_has(told, f"{cache} belongs to user {NOBODY + 1}, not to {user}", "PAGEDOPT_CACHE_DIR")
    assert not files(cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o777


@as_root
def test_a_folder_that_may_not_be_written_is_read_and_not_changed(place: Path) -> None:
    cache = own(place / "cache", NOBODY)
    assert in_child(use, NOBODY) == Used(RIGHT, [])
    before = files(cache)
    cache.chmod(0o500)
    assert in_child(use, NOBODY) == Used(RIGHT, [])
    assert files(cache) == before


def test_a_folder_open_to_everybody_stays_open_and_unused(place: Path) -> None:
    """As /tmp is, which root must not close."""
    values, (told,) = in_child(use, PAGEDOPT_CACHE_DIR=str(place / "tmp"))
    assert values == RIGHT
    assert "open to everybody" in told
    assert stat.S_IMODE((place / "tmp").stat().st_mode) == 0o1777


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_not_followed(place: Path, dangling: bool) -> None:
    if not dangling:
        (place / "real").mkdir(mode=0o700)
    (place / "cache").symlink_to(place / "real")
    values, (told,) = in_child(use)
    assert values == RIGHT
    assert_has(told, f"{place / 'cache'} is a symbolic link; name {place / 'real'} in its place", "PAGEDOPT_CACHE_DIR")
    assert not files(place / "real")


@as_root
@pytest.mark.parametrize(
    ("mode", "group", "used"),
    [(0o755, 0, True), (0o1777, 0, True), (0o777, 0, False), (0o775, 0, False), (0o775, NOBODY, True),
     (0o777, NOBODY, False)],
)  # fmt: skip
def test_a_folder_that_others_could_replace_is_not_used(place: Path, mode: int, group: int, used: bool) -> None:
    """A group with the number of the user is the user's own: where groups are made so, a umask of 002 is usual."""
    home = own(place / "home", NOBODY)
    os.chown(home, NOBODY, group)
    home.chmod(mode)
    values, told = in_child(use, NOBODY, PAGEDOPT_CACHE_DIR=str(home / "cache"))
    assert values == RIGHT
    assert bool(files(home)) == (not told) == used
    for text in told:
        assert_has(text, f"{home} has mode {mode:o}, so others could replace cache in it", f"chmod go-w {home}")


def test_a_full_disk_is_no_error(place: Path) -> None:
    """One of a single page, which is less than a kernel takes."""
    (place / "cache").mkdir(mode=0o700)
    script = f"mount -t tmpfs -o size=4k,mode=700 none {place / 'cache'} && exec {sys.executable} -c '{SCRIPT}'"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    environment = {**os.environ, "TMPDIR": str(place / "tmp")}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    values, told = done.stdout.splitlines()
    assert (values, told.count("PAGEDOPT_CACHE_DIR")) == ("[1.5, -4.0]", 1)
    assert "No space left on device" in told


SCRIPT = """
import warnings, torch
from pagedopt import multi_tensor_apply
from pagedopt.rules import RULES
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    x = torch.tensor([3.0, -8.0])
    multi_tensor_apply(RULES["mul_scalar"], [[x]], {"scalar": 0.5})
print(x.tolist())
print(*[w.message for w in told])
"""


def test_where_no_file_can_grow_kernels_work(place: Path) -> None:
    def without_room() -> tuple[Used, Used]:
        endless = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, endless))  # no file may grow from here on, wherever it is
        first = use()
        resource.setrlimit(resource.RLIMIT_FSIZE, (endless, endless))
        return first, use()

    (values, (told,)), second = in_child(without_room)
    assert (values, second) == (RIGHT, Used(RIGHT, []))
    assert_has(told, "File too large", "PAGEDOPT_CACHE_DIR")
    assert len(files(place / "cache")) >= 1, "room that is there again is not used"


# --- what is found in the kernel cache is not believed: it is ours alone and whole, or made anew ----------------------


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
    kernel_texts.nvrtc()
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
