"""Makes ``import torchvision`` work where its library does not load: beside a build of torch that it is not made for.

Timm, torchmetrics and transformers import it. Pip may find a torchvision made for CUDA beside a CPU build of torch; its
Python then fails at the operators that its library would have declared. They are declared here; nobody here calls one.

    python tests/clients/torchvision_operators.py examples/lightning_fit.py  # a program beside such a torchvision
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

OPERATORS = dict.fromkeys(("nms", "qnms"), "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def declare() -> None:
    """Import torchvision, with its operators declared if that fails; nothing where it is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        return
    import torch

    with contextlib.suppress(RuntimeError):
        import torchvision

        return
    for name, schema in OPERATORS.items():
        torch.library.define(f"torchvision::{name}", schema)
    import torchvision  # noqa: F401


if __name__ == "__main__":
    declare()
    # Not by runpy, which takes this file from the command line: Lightning starts that line again for each more device.
    exec(compile(Path(sys.argv[1]).read_text(), sys.argv[1], "exec", dont_inherit=True))
