"""Create the virtual environment and install pagedopt into it, with the CUDA packages that fit the machine.

`make setup` runs this with the system's Python, so it uses the standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 6)
# The last release whose default wheel is built for CUDA 12 (12.8, runs on any CUDA 12 driver); 2.11 moved to 13.
TORCH_FOR_CUDA12 = "2.10.0"
EXTRAS = ("plots", "test", "dev")
CUDA_INDEX_HINT = (
    'Point pip at an index with one: make clean setup PIP_FLAGS="--extra-index-url URL", with the URL that '
    "'Get Started' on pytorch.org shows for your CUDA version."
)


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Torch:
    """An installed torch: its version, and the CUDA version it was built for (None for a CPU build)."""

    version: str
    cuda: str | None


def leading_numbers(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as '2.13.0+cpu' or '12.8'."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise SetupError(f"cannot read a version from {version!r}")
    return int(match[1]), int(match[2])


def parse_driver_cuda(nvidia_smi: str) -> tuple[int, int] | None:
    """The newest CUDA version the driver supports, read from what nvidia-smi prints."""
    match = re.search(r"CUDA(?: \w+)? Version:\s*(\d+)\.(\d+)", nvidia_smi)
    return (int(match[1]), int(match[2])) if match else None


def choose_torch(installed: Torch | None, driver: tuple[int, int] | None) -> str | None:
    """Which torch to install: None keeps the installed one, '' takes the pinned one, else a version.

    An installed torch stays unless it is too old or was built for a newer CUDA than the driver can run.
    """
    wanted = TORCH_FOR_CUDA12 if driver is not None and driver[0] == 12 else ""
    if installed is None or leading_numbers(installed.version) < OLDEST_TORCH:
        return wanted
    if driver is not None and installed.cuda is not None and leading_numbers(installed.cuda)[0] > driver[0]:
        return wanted
    return None


def choose_extra(torch: Torch, driver: tuple[int, int] | None) -> tuple[str | None, str]:
    """The CUDA extra to install (or None) and the reason in words.

    What torch was built for decides, as CuPy and torch share one process and must load the same CUDA libraries.
    """
    if driver is None:
        return None, "no NVIDIA GPU found (nvidia-smi does not answer): CPU only"
    shown = f"{driver[0]}.{driver[1]}"
    if driver[0] < 12:
        return None, f"the driver supports CUDA {shown}, older than 12.0: the GPU stays unused until it is updated"
    if torch.cuda is None:
        return None, f"torch {torch.version} is a CPU build, so the GPU stays unused. {CUDA_INDEX_HINT}"
    major = leading_numbers(torch.cuda)[0]
    if major > driver[0]:
        return None, (
            f"torch {torch.version} is built for CUDA {torch.cuda}, the driver supports {shown}: the GPU stays unused. "
            f"Update the driver, or take a build for CUDA {driver[0]}. {CUDA_INDEX_HINT}"
        )
    if major not in (12, 13):
        return None, f"torch {torch.version} is built for CUDA {torch.cuda}, 12 and 13 work here: CPU only"
    return f"cuda{major}", f"torch {torch.version} is built for CUDA {torch.cuda}, the driver supports {shown}"


def adapt_constraints(text: str, torch: str | None, has_gpu: bool) -> str:
    """The constraints for this machine: ``torch`` as chosen by choose_torch, no CUDA pins beside a GPU."""
    lines = []
    for line in text.splitlines():
        name = line.partition("==")[0].strip().lower()
        if name == "torch" and torch != "":
            if torch is not None:
                lines.append(f"torch=={torch}")
        elif not (has_gpu and name.startswith(("cuda-", "nvidia-"))):
            lines.append(line)
    return "\n".join(lines) + "\n"


def constraints_beside(text: str, pinned: str, torch: Torch) -> str:
    """The constraints once ``torch`` is installed: it stays, and torchvision is the one made for it.

    Each torchvision asks for one torch, so beside another than the pinned one pip finds the right one by itself.
    """
    made_for = re.search(r"(?m)^torch==(.*)$", pinned)
    same = made_for is not None and torch.version.partition("+")[0] == made_for[1]
    dropped = ("torch",) if same else ("torch", "torchvision")
    lines = [line for line in text.splitlines() if line.partition("==")[0].strip().lower() not in dropped]
    return "\n".join([*lines, f"torch=={torch.version}"]) + "\n"


def driver_cuda() -> tuple[int, int] | None:
    """Ask nvidia-smi what the driver supports; None without a GPU that answers."""
    try:
        answer = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_driver_cuda(answer.stdout)


def installed_torch(python: Path) -> Torch | None:
    """The torch that ``python`` imports, or None."""
    code = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda]))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if answer.returncode:
        return None
    version, cuda = json.loads(answer.stdout.splitlines()[-1])
    return Torch(version, cuda)


def say(message: str) -> None:
    """Print one line of progress."""
    print(f"set-up: {message}", flush=True)


def create_venv(folder: Path, flags: list[str]) -> Path:
    """Create the environment unless it works already; return its interpreter."""
    python = folder / "bin" / "python"
    if python.exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return python
    say(f"creating {folder} with Python {sys.version.split()[0]}")
    if subprocess.run([sys.executable, "-m", "venv", "--clear", *flags, str(folder)]).returncode:
        raise SetupError(
            "Python could not create a virtual environment. On Debian and Ubuntu install the package python3-venv; "
            "or pass PYTHON=/path/to/another/python3."
        )
    return python


def pip_install(python: Path, constraints: Path, flags: list[str], *what: str) -> None:
    """Install with pip under the constraints."""
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    command = [*pip, "-c", str(constraints), *flags, *what]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise SetupError(
            f"pip could not install {' '.join(what)} (its message is above). Behind a proxy or with your own package "
            'index, pass options with PIP_FLAGS="…".'
        )


def check_torchvision(python: Path, torch: Torch) -> None:
    """Say so where a torchvision is installed that does not load, since much else imports it."""
    found = "import importlib.util as u, sys; sys.exit(u.find_spec('torchvision') is None)"
    if subprocess.run([python, "-c", found], check=False).returncode:
        return
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        say(
            f"the torchvision that pip found does not load beside torch {torch.version}: it is made for another build. "
            "The tests declare the operators that it misses (tests/clients/torchvision_operators.py). For your own "
            "work take both from one index, or uninstall torchvision, which only timm needs."
        )


def compile_look(python: Path) -> None:
    """Compile the look of steps now; without it the first optimizer would begin to, in the background."""
    say("compiling the look of steps (half a minute)")
    code = "from pagedopt.system import look as b; print('' if b.compiled_look(wait=True) else b.why_none())"
    answer = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if reason := (answer.stdout + answer.stderr).strip():
        say(f"steps will look in Python, which takes longer: {reason.splitlines()[-1]}")


def set_up(venv: Path, venv_flags: list[str], pip_flags: list[str], version: str, more: list[str]) -> None:
    """Bring the environment up to date. Running it again on a finished one changes nothing.

    ``version`` is the torch the user asked for, or '' to choose one; ``more`` are extras beyond those always installed.
    """
    python = create_venv(venv, venv_flags)
    driver = driver_cuda()
    before = installed_torch(python)
    choice = version or choose_torch(before, driver)
    constraints = venv.resolve() / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text()
    constraints.write_text(adapt_constraints(pinned, choice, has_gpu=driver is not None))
    if before is not None and choice is None:
        say(f"keeping the installed torch {before.version} (`make clean setup` takes the pinned one)")
    else:
        say("installing torch first, since its CUDA version decides the rest")
        pip_install(python, constraints, pip_flags, "torch")
    torch = installed_torch(python)
    if torch is None:
        raise SetupError(f"torch was installed but `{python} -c 'import torch'` fails; run it to see why")
    extra, reason = choose_extra(torch, driver)
    say(reason)
    constraints.write_text(constraints_beside(constraints.read_text(), pinned, torch))
    extras = ",".join([*EXTRAS, *more, *([extra] if extra else [])])
    say(f"installing pagedopt[{extras}]")
    pip_install(python, constraints, pip_flags, "-e", f".[{extras}]")
    check_torchvision(python, torch)
    compile_look(python)
    say("done")


def main() -> int:
    """Parse the command line and set up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--venv-flags", type=shlex.split, default=[], help="more options for venv, in one string")
    parser.add_argument("--pip-flags", type=shlex.split, default=[], help="more options for pip, in one string")
    parser.add_argument("--torch", default="", help="version of torch, in place of the one set-up would choose")
    parser.add_argument("--extras", default="", help="more extras of pyproject.toml to install, with commas")
    args = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        print("set-up: Python 3.11 or newer is needed; pass PYTHON=/path/to/python3", file=sys.stderr)
        return 1
    try:
        set_up(args.venv, args.venv_flags, args.pip_flags, args.torch, [e for e in args.extras.split(",") if e])
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
