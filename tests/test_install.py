"""What a user installs: wheel and sdist, used from another folder; and what type checkers say of a user's script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from paths import ROOT

import pagedopt

SCRIPT = """
import pagedopt, torch
from pagedopt import PagedAdamW

p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
PagedAdamW([p]).step()
print(pagedopt.__file__, bool((p < 1).all()), pagedopt.rules.adamw.cuda_source().count("adamw") > 0)
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=100, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist."""
    pytest.importorskip("hatchling", reason="hatchling is not installed; `pip install .[test]` brings it")
    out = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "hatchling", "build", "-d", out, cwd=ROOT)
    return out


@pytest.fixture(scope="module")
def site(built: Path) -> Path:
    """A folder that the wheel is installed into, with nothing else."""
    (wheel,) = built.glob("*.whl")
    target = built / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def from_there(site: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site), **more}


def test_a_wheel_has_all_that_the_package_needs_and_no_more(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if name.startswith("pagedopt/")}
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "pagedopt", cwd=ROOT).splitlines()
    assert inside == {name for name in listed if (ROOT / name).exists()}
    assert "pagedopt/py.typed" in inside
    assert any(name.endswith(".cu") for name in inside)
    assert not [name for name in names if not re.match(r"pagedopt(/|-[\d.]+\.dist-info/)", name)]


def test_a_wheel_works_from_another_folder(site: Path, tmp_path: Path) -> None:
    out = run(sys.executable, "-c", SCRIPT, cwd=tmp_path, env=from_there(site)).split()
    assert Path(out[0]).is_relative_to(site)
    assert out[1:] == ["True", "True"]
    program = site / "bin" / "pagedopt"
    for command in ([program], [sys.executable, "-m", "pagedopt"]):
        said = run(*command, "--version", cwd=tmp_path, env=from_there(site))
        assert said == f"pagedopt {pagedopt.__version__}\n"
    assert "seven billion" in run(program, "plan", "--help", cwd=tmp_path, env=from_there(site))


def test_an_sdist_makes_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    (wheel,) = built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    names = {p.name for p in tree.iterdir()}
    assert {"README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "tests", "notes"} <= names
    raw = [*tree.glob("experiments/results/*.json"), *tree.glob("notes/raw/*")]
    assert not raw, "raw results stay in the repository"
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=tree)
    (again,) = (tmp_path / "again").glob("*.whl")
    one, other = (
        {i.filename: i.CRC for i in zipfile.ZipFile(w).infolist() if not i.filename.endswith("RECORD")}
        for w in (wheel, again)
    )
    assert one == other


def test_the_line_without_a_clone_is_one_that_pip_takes() -> None:
    (line,) = re.findall(r"pip install '(pagedopt\[.*?)'", (ROOT / "README.md").read_text())
    assert Requirement(line).url == "git+https://example.org/pagedopt.git"  # a domain that is kept for examples


def asked_for(wanted: list[str]) -> Iterator[Requirement]:
    """What is installed with the requirements ``wanted``, as the packages that are installed here say."""
    known: set[tuple[str, str]] = set()
    left = [(Requirement(item), "") for item in wanted]
    while left:
        requirement, extra = left.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        yield requirement
        for inner in {"", *requirement.extras}:
            if (requirement.name, inner) not in known and requirement.name != "torch":
                known.add((requirement.name, inner))
                left += [(Requirement(item), inner) for item in distribution(requirement.name).requires or ()]


EXTRAS = ["plots", "rivals", "test", "dev", pytest.param("clients", marks=pytest.mark.clients)]


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_keeps_the_torch_that_is_installed(extra: str) -> None:
    """Whichever it is: nothing asks for one version, as torchvision does, nor for one that is newer than need be."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    try:
        requirements = list(asked_for(extras[extra]))
    except PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    for requirement in requirements:
        if requirement.name == "torch":
            assert all(requirement.specifier.contains(version) for version in ("2.6", "2.999")), str(requirement)


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    said = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert said == [pagedopt.__version__]
    assert f"## {pagedopt.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_hints_say_to_install_exists() -> None:
    """Names of packages, never an extra of this one, which no index holds."""
    hints = []
    for path in [*ROOT.glob("pagedopt/**/*.py"), *ROOT.glob("experiments/**/*.py")]:
        text = path.read_text()
        assert "pagedopt[" not in text, path
        hints += re.findall(r"pip install '?([a-z][\w-]+)", text)
    pins = (ROOT / "constraints.txt").read_text()
    assert {"matplotlib", "nvidia-cuda-nvrtc", "cupy-cuda"} <= set(hints)
    for name in hints:
        assert f"\n{name}" in pins, name


def test_a_star_brings_classes_and_functions_alone() -> None:
    here: dict[str, object] = {}
    exec("from pagedopt import *", here)
    brought = {name: value for name, value in here.items() if name != "__builtins__"}
    assert not [name for name in brought if name.startswith("_")]
    assert all(callable(value) for value in brought.values())
    assert {"PagedAdamW", "estimate", "run_with_room", "rule", "Options"} <= brought.keys()
    assert not [name for name in brought if name.startswith("foreach_")]


RIGHT = """
import torch
import pagedopt
from pagedopt import *
from pagedopt.placements import FileArena
from pagedopt.transports import MemcpyTransport

net = torch.nn.Linear(2, 2)
for name in (None, "host"):
    ...
PagedAdamW(net.parameters(), lr=0.1, placement="mapped", device_budget=0.5, state_format="bf16", transport="struct")
pagedopt.PagedLion(net.parameters(), placement=FileArena, transport=MemcpyTransport, state_format=torch.float16)
pagedopt.PagedSGD(net.parameters(), host_access="staged", state_format={"momentum_buffer": "float32"}, blocks=8)
print(pagedopt.estimate("7B", device_budget="2GiB", placement="managed").seconds)
"""
#: Lines with a slip, and a word of what is said.
SLIPS = {
    "pagedopt.nosuch": "nosuch",
    'pagedopt.PagedAdamW(net.parameters(), placement="mappd")': "placement",
    'pagedopt.PagedAdamW(net.parameters(), host_access="stagged")': "host_access",
    'pagedopt.PagedAdamW(net.parameters(), transport="pigeon")': "transport",
    'pagedopt.PagedAdamW(net.parameters(), state_format="int3")': "state_format",
    "pagedopt.PagedAdamW(net.parameters(), budget=3)": "budget",
    'pagedopt.estimate("7B", placement="mappd")': "placement",
    'pagedopt.estimate("7B").secnds': "secnds",
    "pagedopt.placements.nosuch": "nosuch",
    "pagedopt.optim.nosuch": "nosuch",
    "pagedopt.Entry": "Entry",
}


@pytest.mark.parametrize("torchs", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_type_checker_finds_slips_in_a_users_script(torchs: bool, tmp_path: Path) -> None:
    """Without torch's own types that takes a second, and a format may then be anything, since a dtype may."""
    pytest.importorskip("mypy")
    (tmp_path / "right.py").write_text(RIGHT)
    first = "import torch, pagedopt, pagedopt.placements, pagedopt.optim\nnet = torch.nn.Linear(2, 2)\n"
    (tmp_path / "wrong.py").write_text(first + "\n".join(SLIPS))
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "pagedopt").symlink_to(ROOT / "pagedopt")
    options = [] if torchs else ["--no-site-packages", "--disable-error-code=import-not-found"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--follow-imports=silent", f"--cache-dir={tmp_path}", "right.py",
         "wrong.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(stubs)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert "right.py" not in done.stdout, done.stdout
    for number, (line, word) in enumerate(SLIPS.items(), 3):
        if torchs or word != "state_format":
            said = [text for text in done.stdout.splitlines() if text.startswith(f"wrong.py:{number}: ")]
            assert any(word in text for text in said), (line, done.stdout + done.stderr)
