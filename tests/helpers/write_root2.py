"""State dicts and a pickle with first moments in root 2, which ``tests/optim/test_int8_before.py`` reads for ever.

The file in ``data`` is from commit d61212d, the last that stored such.  It was made by

    mkdir /tmp/old && git archive d61212d pagedopt | tar x -C /tmp/old
    PYTHONPATH=/tmp/old:tests/helpers python tests/helpers/write_root2.py tests/helpers/data/pagedopt-d61212d-int8.pt
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import torch
from write_golden import gradient, packed, values

from pagedopt import PagedAdamW, PagedLion

SHAPES = ((70, 90), (5,), (4500,))
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (PagedAdamW, {"lr": 0.03, "betas": (0.8, 0.95), "seed": 3, "v_rounding": "stochastic"}),
    "lion": (PagedLion, {"lr": 0.003}),
}


def trained(name: str) -> Any:
    """After three steps."""
    kind, hyper = KINDS[name]
    params = [torch.nn.Parameter(values(shape, 100 + i, torch.float32, "cpu")) for i, shape in enumerate(SHAPES)]
    optimizer = kind(params, state_format="int8", **hyper)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = gradient(i, p, step)
        optimizer.step()
    return optimizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    made = {name: trained(name) for name in KINDS}
    found = {name: {"state_dict": each.state_dict(), "pickle": pickle.dumps(each)} for name, each in made.items()}
    parser.parse_args().out.write_bytes(packed(found))
