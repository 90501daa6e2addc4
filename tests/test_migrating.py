"""``notes/migrating.md`` knows every argument of others; where a library is installed, its training is gone on with.

What its code does is held by ``tests/test_snippets.py``, what is read of recorded files by
``tests/optim/test_checkpoint_foreign.py``.
"""

from __future__ import annotations

import copy
import inspect
import re

import pytest
import torch
from paths import ROOT

import pagedopt

PAGE = (ROOT / "notes" / "migrating.md").read_text()
NAMES = {
    "torch.optim": ["AdamW", "Adam", "SGD"],
    "bitsandbytes.optim": ["PagedAdamW32bit", "PagedAdamW8bit", "AdamW", "PagedLion32bit", "SGD32bit"],
    "torchao.optim": ["CPUOffloadOptimizer", "AdamW8bit"],
}
CLASSES = [(module, name) for module, names in NAMES.items() for name in names]


def section(module: str) -> str:
    """What the page says of a library."""
    head = module if module == "torch.optim" else module.partition(".")[0]
    return re.split(r"^## ", PAGE.partition(f"\n## {head}\n")[2], maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_every_argument_is_on_the_page(module: str, name: str) -> None:
    theirs = getattr(pytest.importorskip(module), name)
    said = {word for code in re.findall(r"`([^`\n]+)`", section(module)) for word in re.findall(r"\w+", code)}
    assert name in said
    known = inspect.signature(theirs.__init__).parameters.values()
    asked = {each.name for each in known if each.kind is not each.VAR_KEYWORD} - {"self"}
    passed_on = set(inspect.signature(pagedopt.PagedAdamW.__init__).parameters) if module == "torchao.optim" else set()
    assert not asked - said - passed_on


def test_what_the_page_calls_the_same_has_the_same_default() -> None:
    for theirs, ours in ((torch.optim.AdamW, pagedopt.PagedAdamW), (torch.optim.SGD, pagedopt.PagedSGD)):
        mine = inspect.signature(ours.__init__).parameters
        for name, argument in inspect.signature(theirs.__init__).parameters.items():
            assert mine[name].default == argument.default, name
    bitsandbytes = pytest.importorskip("bitsandbytes")
    theirs, mine = (inspect.signature(c.__init__).parameters for c in (bitsandbytes.optim.AdamW, pagedopt.PagedAdamW))
    for name in ("lr", "betas", "eps", "weight_decay"):
        assert theirs[name].default == mine[name].default, name


def test_training_begun_with_bitsandbytes_goes_on_with_ours() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    nets = [torch.nn.Linear(16, 16) for _ in range(2)]
    theirs = bitsandbytes.optim.PagedAdamW32bit(nets[0].parameters(), lr=0.01, weight_decay=0.1)
    steps(nets[0], theirs, range(3))
    nets[1].load_state_dict(nets[0].state_dict())
    ours = pagedopt.PagedAdamW(nets[1].parameters(), lr=1.0, state_format="float32", device_budget="auto")
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    steps(nets[0], theirs, range(3, 6))
    steps(nets[1], ours, range(3, 6))
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6)


def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
