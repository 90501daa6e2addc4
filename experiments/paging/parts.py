"""One JSON file from parts that were measured at different times: only on one machine, with one set of versions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: What must be alike for numbers to stand in one file; packages that only one part uses are not among it.
MACHINE = ("processor", "cores", "gpu", "python", "torch", "torch_cuda", "numpy", "driver")
VERSIONS = ("cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "numba")


def chosen(text: str, known: Sequence[str]) -> list[str]:
    """The parts that ``--only`` names, in the order in which they run.

    Raises:
        argparse.ArgumentTypeError: there is no such part, or none is named.

    >>> chosen("sweep, link", ["link", "sweep", "cpu"])
    ['link', 'sweep']
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wrong = f"no part {', '.join(map(repr, unknown))}" if unknown else "no part is named"
        raise argparse.ArgumentTypeError(f"{wrong}; there are {', '.join(known)}")
    return [name for name in known if name in names]


def signature(result: Mapping[str, Any]) -> dict[str, Any]:
    """What must be alike in results that are put together."""
    machine = result["machine"]
    versions = {name: machine.get("versions", {}).get(name) for name in VERSIONS}
    fields = {name: machine.get(name) for name in MACHINE}
    return {**fields, **versions, "device": result["device"], "quick": result["quick"]}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In what two results cannot be put together."""
    one, other = signature(old), signature(new)
    return [f"{name}: {one[name]!r}, now {other[name]!r}" for name in one if one[name] != other[name]]


def merged(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of both, those of ``new`` in place of older ones.

    Raises:
        ValueError: the results are of two machines or of two sets of versions.
    """
    if old is None:
        return dict(new)
    if wrong := differences(old, new):
        raise ValueError("not measured on one machine with one set of versions: " + "; ".join(wrong))
    versions = {**old["machine"]["versions"], **new["machine"]["versions"]}
    parts = {**old["parts"], **new["parts"]}
    return {**old, **new, "machine": {**new["machine"], "versions": versions}, "parts": parts}


def load(path: Path) -> dict[str, Any] | None:
    """Results of an earlier run, or None if there are none.

    Raises:
        ValueError: the file holds no results of this experiment.
    """
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or not {"machine", "device", "quick", "parts"} <= set(found):
        raise ValueError(f"{path} does not hold results of this experiment; move it away")
    return found


def set_aside(path: Path) -> Path:
    """Rename a file of another machine, so that nothing measured is lost; returns where it is now."""
    stamp = json.loads(path.read_text())["machine"].get("when", "earlier").replace(":", "")
    target = path.with_name(f"other-{path.stem}-{stamp}.json")
    path.rename(target)
    return target


def left_out(result: Mapping[str, Any], known: Sequence[str], without_gpu: Sequence[str]) -> list[str]:
    """What is missing from results: parts (on a CPU, all but those that run without a GPU), and contenders of parts."""
    missing = [name for name in known if name not in result["parts"]]
    gpu = [name for name in missing if result["device"] == "cpu" and name not in without_gpu]
    lines = [f"parts {', '.join(gpu)}: need a GPU"] if gpu else []
    lines += [f"part {name}: not measured" for name in missing if name not in gpu]
    return lines + [f"{name}, {line}" for name, part in result["parts"].items() for line in part.get("left_out", ())]
