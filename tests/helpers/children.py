"""Python in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def python(*arguments: object, timeout: float = 100, cwd: object = None, **variables: str) -> str:
    """What Python says, given these arguments and more variables of the environment; it ends well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


BESIDE_TORCH = """
import json, sys, torch
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
torch.optim.AdamW([p]).step()
before = set(sys.modules)
from pagedopt import PagedAdamW
optimizer = PagedAdamW([p])
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded_beside_torch() -> list[str]:
    """Modules that a step and a load import where torch's optimizer has taken a step."""
    names: list[str] = json.loads(python("-c", BESIDE_TORCH))
    return names
