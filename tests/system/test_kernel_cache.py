"""Where kernels are kept between runs: in a folder of ours alone, or nowhere."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from command_line import assert_has
from forks import in_child

from pagedopt.kernels import nvrtc
from pagedopt.system import warn
from pagedopt.system.compile_text import load

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
HALVE = "import numba\n\n@numba.njit\ndef kernel(x):\n    return x / 2\n"


class Used(NamedTuple):
    """What came of using a kernel in a process that had none."""

    value: float
    warnings: list[str]


def use(text: str = HALVE) -> Used:
    """A kernel that is new to this process: it is found in the cache, or compiled."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        value = load(text, "halve", "pagedopt.kernels.numba_numbers")(-8.0)
    return Used(value, [str(w.message) for w in told])


RIGHT = Used(-4.0, [])


def anew() -> Used:
    """As in another process, which has said nothing yet."""
    with mock.patch.object(warn, "_said", set()):
        return use()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach, with room for a cache and for temporary files, which lie nowhere else."""
    use()  # a child that is another user cannot import what is needed for it
    folder = Path(tempfile.mkdtemp(prefix="pagedopt-tests-"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        patch.setenv("PAGEDOPT_CACHE_DIR", str(folder / "cache"))
        yield folder
    shutil.rmtree(folder)


def own(folder: Path, user: int, mode: int = 0o755) -> Path:
    folder.mkdir(exist_ok=True)
    os.chown(folder, user, user)
    folder.chmod(mode)
    return folder


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file below, with what says whether it is still the same."""
    return {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def modes(folder: Path) -> dict[Path, int]:
    return {p: stat.S_IMODE(p.lstat().st_mode) for p in [folder, *folder.rglob("*")]}


def test_a_second_process_finds_what_the_first_compiled(place: Path) -> None:
    assert anew() == RIGHT
    before = files(place / "cache")
    assert before
    assert anew() == RIGHT
    assert files(place / "cache") == before


@pytest.mark.parametrize("user", [None, pytest.param(NOBODY, marks=as_root)])
@pytest.mark.parametrize("umask", [0, 0o022, 0o777], ids=oct)
def test_what_we_make_is_for_us_alone_whatever_the_umask(place: Path, umask: int, user: int | None) -> None:
    home = own(place / "home", user or os.geteuid())
    where = home / "not" / "yet" / "there"
    for _ in range(2):
        assert in_child(use, user, umask, PAGEDOPT_CACHE_DIR=str(where)) == RIGHT
    found = modes(home / "not")
    assert len(found) >= 4
    for path, mode in found.items():
        assert mode & 0o677 == 0o600, f"{path} has mode {mode:o}"


#: What to set, by what is wrong with it.
USELESS = {
    "no home": {"HOME": "/dev/null"},
    "no XDG": {"XDG_CACHE_HOME": "/dev/null"},
    "read-only": {"PAGEDOPT_CACHE_DIR": "/proc/cache"},
    "path too long": {"PAGEDOPT_CACHE_DIR": "/" + "/".join(["a" * 200] * 30)},
}


@pytest.mark.parametrize("environment", USELESS.values(), ids=USELESS)
def test_where_nothing_can_be_kept_there_is_one_warning(
    place: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PAGEDOPT_CACHE_DIR": "", "XDG_CACHE_HOME": "", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(warn, "_said", set())
    (value, (told,)), second = use(), use()
    assert (value, second) == (RIGHT.value, RIGHT)
    assert_has(told, "every process compiles its own", "PAGEDOPT_CACHE_DIR")
    assert not list((place / "tmp").iterdir())


def linked(place: Path) -> Path:
    (place / "real").mkdir(mode=0o700)
    (place / "cache").symlink_to(place / "real")
    return place / "cache"


def in_a_home(mode: int, group: int = 0) -> Callable[[Path], Path]:
    def made(place: Path) -> Path:
        home = own(place / "home", NOBODY, mode)
        os.chown(home, NOBODY, group)
        return home / "cache"

    return made


OTHERS = "home has mode {}, so others could replace cache in it; close it to them: chmod go-w"
#: What makes a folder, who uses it (None: we do), and why it is not used; "": it is.
FOLDERS: dict[str, tuple[Callable[[Path], Path], int | None, str]] = {
    "somebody else's": (lambda place: own(place / "cache", 1, 0o777), NOBODY, "belongs to user 1, not to 65534"),
    "not root's": (lambda place: own(place / "cache", 1, 0o777), 0, "belongs to user 1, not to 0"),
    "as /tmp": (lambda place: place / "tmp", None, "tmp is open to everybody"),  # root must not close it
    "a link": (linked, None, "cache is a symbolic link; name"),
    "in a usual home": (in_a_home(0o755), NOBODY, ""),
    "sticky": (in_a_home(0o1777), NOBODY, ""),
    "in a home of all": (in_a_home(0o777), NOBODY, OTHERS.format(777)),
    "in a home of a group": (in_a_home(0o775), NOBODY, OTHERS.format(775)),
    # A group with the number of the user is the user's own: where groups are made so, a umask of 002 is usual.
    "in a home of its own group": (in_a_home(0o775, NOBODY), NOBODY, ""),
}


@pytest.mark.parametrize(
    "which", [pytest.param(name, marks=[] if user is None else [as_root]) for name, (_, user, _) in FOLDERS.items()]
)
def test_a_folder_that_others_can_change_is_not_used_and_stays_as_it_is(place: Path, which: str) -> None:
    make, user, why = FOLDERS[which]
    folder = make(place)
    before = modes(place)
    value, told = in_child(use, user, PAGEDOPT_CACHE_DIR=str(folder))
    assert value == RIGHT.value
    assert len(told) == bool(why)
    if why:
        assert_has(told[0], str(place), why, "PAGEDOPT_CACHE_DIR")
    assert modes(place).items() >= before.items()
    assert bool(files(place)) == (not why)


@as_root
def test_a_folder_that_may_not_be_written_is_read_and_not_changed(place: Path) -> None:
    cache = own(place / "cache", NOBODY)
    assert in_child(use, NOBODY) == RIGHT
    before = files(cache)
    cache.chmod(0o500)
    assert in_child(use, NOBODY) == RIGHT
    assert files(cache) == before


def test_where_no_file_can_grow_kernels_work(place: Path) -> None:
    def without_room() -> tuple[Used, Used]:
        endless = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, endless))  # no file may grow from here on, wherever it is
        first = use()
        resource.setrlimit(resource.RLIMIT_FSIZE, (endless, endless))
        return first, use()

    (value, (told,)), second = in_child(without_room)
    assert (value, second) == (RIGHT.value, RIGHT)
    assert_has(told, "File too large", "PAGEDOPT_CACHE_DIR")
    assert files(place / "cache"), "room that is there again is not used"


# --- what is found in the kernel cache is not believed: it is ours alone and whole, or made anew ----------------------


def plant(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[-len(data) // at] ^= 1
    plant(path, bytes(data))


def swap_for_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".was"))
    path.symlink_to(path.with_suffix(".was"))


def swap_for_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: plant(path, path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: plant(path, b""),
    "garbage": lambda path: plant(path, b"\x80\x05garbage" * 100),
    "a bit at the end": lambda path: flip(path, 3),
    "a bit at the start": lambda path: flip(path, 1),
    "open to the group": lambda path: path.chmod(0o660),
    "open to others": lambda path: path.chmod(0o602),
    "a link": swap_for_a_link,
    "a pipe": swap_for_a_pipe,
}


@as_root
def test_what_others_planted_is_not_run(place: Path) -> None:
    """Somebody wrote into the folder while it was open: over every file there is, and under every name it had."""
    cache, mark = place / "cache", place / "mark"
    assert anew() == RIGHT
    cache.chmod(0o777)

    class Evil:
        def __reduce__(self) -> Any:
            return exec, (f"import os\nos.close(os.open({str(mark)!r}, os.O_CREAT))\n",)

    for path in files(cache):
        path.unlink()
        plant(path, pickle.dumps(Evil()))
        os.chown(path, NOBODY, NOBODY)
    value, (told,) = anew()
    assert not mark.exists(), "a planted file was run"
    assert value == RIGHT.value
    assert f"belongs to user {NOBODY}" in told
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert all(p.stat().st_uid == os.geteuid() for p in files(cache))
    assert anew() == RIGHT


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_made_anew_with_one_warning(place: Path, damage: Callable[[Path], None]) -> None:
    assert anew() == RIGHT
    before = files(place / "cache")
    for path in before:
        damage(path)
    value, (told,) = anew()
    assert value == RIGHT.value
    assert_has(told, str(place / "cache"), "compiled anew")
    assert anew() == RIGHT, "it was not kept"
    assert {p for p in files(place / "cache") if p.suffix != ".was"} == set(before)


@as_root
def test_an_unreadable_file_is_made_anew(place: Path) -> None:
    own(place / "cache", NOBODY)
    assert in_child(use, NOBODY) == RIGHT
    for path in files(place / "cache"):
        path.chmod(0)
    value, (told,) = in_child(use, NOBODY)
    assert value == RIGHT.value
    assert "Permission denied" in told
    assert in_child(use, NOBODY) == RIGHT


def test_a_file_under_another_name_is_damaged(place: Path) -> None:
    anew()
    (mine,) = files(place / "cache")
    use(HALVE.replace("/ 2", "/ 3"))
    (others,) = set(files(place / "cache")) - {mine}
    shutil.copy(others, mine)
    value, (told,) = anew()
    assert value == RIGHT.value
    assert "damaged" in told


def test_a_folder_in_the_place_of_a_file_is_no_error(place: Path) -> None:
    anew()
    (path,) = files(place / "cache")
    path.unlink()
    (path / "full").mkdir(parents=True)
    assert anew().value == RIGHT.value


def test_processes_that_start_together_share_a_folder(place: Path) -> None:
    """Some compile, some find; one that finds a file finds all of it."""
    children = []
    for _ in range(6):
        if (child := os.fork()) == 0:
            try:
                well = all(use() == RIGHT for _ in range(3))
            except BaseException:
                well = False
            os._exit(0 if well else 1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 6
    assert len(files(place / "cache")) == 1, "a temporary file was left"


# ---- what NVRTC compiles, which another compiler plays ----


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been compiled so far."""
    texts: list[str] = []

    def compile_cuda(text: str, *_: Any) -> tuple[bytes, list[str]]:
        texts.append(text)
        return text.encode(), ["symbol"]

    monkeypatch.setattr(nvrtc, "compile_cuda", compile_cuda)
    monkeypatch.setattr(nvrtc, "_nvrtc_version", lambda: "any")
    monkeypatch.setattr(warn, "_said", set())
    return texts


def ask_for(*texts: str) -> None:
    for text in texts:
        assert nvrtc.cached_cubin(text, "name", "sm_90") == (text.encode(), "symbol")


def test_a_cubin_is_compiled_once_unless_its_file_is_damaged_or_gone(place: Path, compiled: list[str]) -> None:
    ask_for("one", "other", "one")
    assert compiled == ["one", "other"]
    found = files(place / "cache")
    assert {path.suffix for path in found} == {".cubin"}
    for path in found:
        DAMAGE["truncated"](path)
    with pytest.warns(RuntimeWarning, match="compiled anew") as told:
        ask_for("one", "other")
    assert len(told) == 1
    for path in found:
        path.unlink()  # as a cleaner does
    ask_for("one")
    assert compiled == ["one", "other"] * 2 + ["one"]


def test_cubins_that_cannot_be_kept_hold_no_descriptors(place: Path, compiled: list[str]) -> None:
    """However many: ``select.select`` takes none above 1,023, and many systems allow no more."""
    (place / "cache").mkdir()
    (place / "cache").chmod(0o1777)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.warns(RuntimeWarning, match="PAGEDOPT_CACHE_DIR"):
        ask_for(*(f"text {i}" for i in range(50)))
    assert len(os.listdir("/proc/self/fd")) == before
    assert (len(compiled), files(place / "cache")) == (50, {})
