"""The choices of scripts/setup_env.py, which depend on plain values only."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from typing import Any

import pytest
from paths import ROOT


def load_script() -> Any:
    """Import the script, which is in no package."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


setup_env = load_script()
Torch = setup_env.Torch


PRINTED = [
    ("| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4     |", (12, 4)),
    ("| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0     |", (13, 0)),
    ("| NVIDIA-SMI 595.10   KMD Version: 595.10   CUDA UMD Version: 13.2 |", (13, 2)),
    ("| Driver Version: 470.1   CUDA Version: N/A |", None),
    ("", None),
]


@pytest.mark.parametrize(("printed", "version"), PRINTED)
def test_driver_version_is_read(printed: str, version: tuple[int, int] | None) -> None:
    assert setup_env.parse_driver_cuda(printed) == version


CHOICES = [
    (None, None, ""),
    (None, (13, 0), ""),
    (None, (12, 4), "2.10.0"),
    (Torch("2.11.0+cu130", "13.0"), (13, 2), None),
    (Torch("2.11.0+cu130", "13.0"), (12, 8), "2.10.0"),
    (Torch("2.13.0+cu126", "12.6"), (13, 0), None),
    (Torch("2.13.0+cu126", "12.6"), (12, 4), None),
    (Torch("2.13.0+cpu", None), (12, 4), None),
    (Torch("2.5.1", "12.4"), None, ""),
    (Torch("2.5.1", "12.4"), (12, 4), "2.10.0"),
    (Torch("2.6.0", "12.4"), None, None),
]


@pytest.mark.parametrize(("installed", "driver", "choice"), CHOICES)
def test_torch_is_chosen(installed: Any, driver: tuple[int, int] | None, choice: str | None) -> None:
    assert setup_env.choose_torch(installed, driver) == choice


EXTRAS = [
    (Torch("2.13.0", "13.0"), (13, 0), "cuda13", "CUDA 13.0"),
    (Torch("2.13.0+cu126", "12.6"), (13, 0), "cuda12", "CUDA 12.6"),
    (Torch("2.10.0", "12.8"), (12, 4), "cuda12", "CUDA 12.8"),
    (Torch("2.13.0", "13.0"), (12, 8), None, "Update the driver"),
    (Torch("2.13.0+cpu", None), (13, 0), None, "PIP_FLAGS"),
    (Torch("2.13.0+cpu", None), None, None, "no NVIDIA GPU"),
    (Torch("2.13.0", "13.0"), (11, 8), None, "older than 12.0"),
    (Torch("3.0.0", "14.0"), (14, 0), None, "12 and 13 work"),
]


@pytest.mark.parametrize(("torch", "driver", "extra", "said"), EXTRAS)
def test_extra_follows_torch(torch: Any, driver: tuple[int, int] | None, extra: str | None, said: str) -> None:
    chosen, reason = setup_env.choose_extra(torch, driver)
    assert chosen == extra
    assert said in reason


def test_constraints_follow_the_choice() -> None:
    pinned = "# versions\ntorch==2.13.0\ncuda-bindings==13.5.0\nnvidia-cuda-nvrtc==13.5.37\nnumpy==2.4.6\n"
    assert setup_env.adapt_constraints(pinned, "", has_gpu=False) == pinned
    assert setup_env.adapt_constraints(pinned, "", has_gpu=True) == "# versions\ntorch==2.13.0\nnumpy==2.4.6\n"
    assert setup_env.adapt_constraints(pinned, "2.10.0", has_gpu=True) == "# versions\ntorch==2.10.0\nnumpy==2.4.6\n"
    assert "torch" not in setup_env.adapt_constraints(pinned, None, has_gpu=False)


def test_every_requirement_is_pinned() -> None:
    """What `make setup` installs must not depend on the day it runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(item for extra in extras for item in extra)]
    names = {requirement.split("<")[0].split(">")[0] for requirement in wanted}
    assert names <= pins


KEPT = [
    (Torch("2.13.0+cpu", None), "timm==1\ntorchvision==0.28.0\ntorch==2.13.0+cpu\n"),
    (Torch("2.10.0", "12.8"), "timm==1\ntorch==2.10.0\n"),
    (Torch("2.13.1", None), "timm==1\ntorch==2.13.1\n"),
]


@pytest.mark.parametrize(("torch", "kept"), KEPT)
def test_torch_stays_and_torchvision_is_the_one_made_for_it(torch: Any, kept: str) -> None:
    pinned = "timm==1\ntorch==2.13.0\ntorchvision==0.28.0\n"
    assert setup_env.constraints_beside(pinned, pinned, torch) == kept
    assert setup_env.constraints_beside(setup_env.adapt_constraints(pinned, None, False), pinned, torch) == kept
