"""Every block of Python that README.md and two of the notes show, and every example of a docstring, runs."""

from __future__ import annotations

import copy
import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import DATA, ROOT

import pagedopt

PAGES = ("README.md", "notes/usage.md", "notes/migrating.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def blocks(name: str) -> list[Any]:
    text = (ROOT / name).read_text()
    return [
        pytest.param(name, found[1], id=f"{name}:{text[: found.start()].count(chr(10)) + 2}")
        for found in BLOCK.finditer(text)
    ]


def trained(params: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, lr=0.01, **options)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Checkpoints by the names that are read; torchao's as its ``state_dict`` makes it, from torch's AdamW inside."""
    monkeypatch.chdir(tmp_path)
    one = trained(list(torch.nn.Linear(64, 64).parameters())).state_dict()
    paged = torch.load(DATA / "bitsandbytes.pt", weights_only=True)["paged"]["state_dict"]
    theirs = {"state": {}, "param_groups": [{**paged["param_groups"][0], "params": [0, 1]}]}
    for key, entry in one["state"].items():
        inner = {**paged["state"][0]["__bnb_optimizer_quant_state__"]}
        inner.update(state1=entry["exp_avg"], state2=entry["exp_avg_sq"])
        theirs["state"][key] = {**paged["state"][0], "step": 1, "__bnb_optimizer_quant_state__": inner}
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    parts = [[p] for p in net.parameters() if p.numel() >= 4096]
    offloaded = [trained(part, fused=True).state_dict() for part in parts]
    small = trained([p for p in net.parameters() if p.numel() < 4096], fused=True).state_dict()
    content = {"torch": one, "bitsandbytes": theirs, "torchao": {"offloaded": offloaded, "on-device": small}}
    for name, value in content.items():
        torch.save(value, f"{name}.pt")
    return copy.deepcopy(content)


@pytest.mark.parametrize(("name", "text"), [each for page in PAGES for each in blocks(page)])
def test_it_runs_as_it_stands(name: str, text: str, files: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    here = Path("snippet.py")
    here.write_text(text)  # a rule is read from its file
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(text, str(here.absolute()), "exec"), names)
    optimizer = names.get("optimizer")
    read = re.findall(r'torch\.load\("(\w+)\.pt"\)', text)
    if read == ["torchao"]:
        states = [names["optimizer"].state[p] for p in names["params"]]
        large = [files["torchao"]["offloaded"][i]["state"][0] for i in (0, 1)]
        small = files["torchao"]["on-device"]["state"]
        expected = [large[0], small[0], large[1], small[1]]
        assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(states, expected, strict=True))
    elif read:
        assert optimizer is not None
        expected = files["torch"]["state"]
        for i, p in enumerate(names["model"].parameters()):
            assert torch.equal(optimizer.state[p]["exp_avg_sq"], expected[i]["exp_avg_sq"])
            assert float(optimizer.state[p]["step"]) == 1
    if "overlap_report(" in text:
        report = names["optimizer"].overlap_report()
        assert report.hidden > report.waited, "the example hides what it is about"
    if "print(" in text:
        assert capsys.readouterr().out.strip()


def examples() -> list[Any]:
    """Of every docstring, as doctest finds them."""
    names = [found.name for found in pkgutil.walk_packages(pagedopt.__path__, "pagedopt.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    found = [test for module in modules for test in doctest.DocTestFinder().find(module) if test.examples]
    return [pytest.param(test, id=test.name) for test in found]


class Shown(doctest.OutputChecker):
    """What an example prints is compared where the docstring shows it."""

    def check_output(self, want: str, got: str, flags: int) -> bool:
        return not want or super().check_output(want, got, flags)


@pytest.mark.parametrize("test", examples())
def test_an_example_runs(test: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the names that its reader has: a model whose gradients are there, an optimizer, batches."""
    text = "".join(example.source for example in test.examples)
    if re.search(r"torch\.(cuda|compile)|cupy|cuStream|numba|rates\.json", text):
        pytest.skip("needs a GPU, a file of rates or a compiler, or shows a part of a kernel")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 4)
    options: dict[str, Any] = {"param_format": "bfloat16+16"} if "float32.pt" in text or "master" in text else {}
    model = model.to(torch.bfloat16 if options else torch.float32)
    if "averaged()" in text:
        options = {"after": pagedopt.ema(0.999)}
    torch.save({name: p.float() for name, p in model.named_parameters()}, "float32.pt")
    optimizer = pagedopt.PagedAdamW(model.parameters(), device_budget=0, **options)
    if "watch_reads" in text:
        optimizer.attach(model)
    batch = torch.randn(2, 4, dtype=model.weight.dtype)
    loss = model(batch).mean()
    loss.backward(retain_graph=True)
    params = [torch.ones(3) for _ in range(2)]
    names = {"model": model, "optimizer": optimizer, "batch": batch, "loss": loss, "params": params, "norms": []}
    names |= {"pagedopt": pagedopt, "torch": torch, "grads": params, "train_an_epoch": lambda: None}
    names |= {"train": lambda *_: optimizer.step(), "evaluate": lambda _: None}
    names["average"] = torch.optim.swa_utils.AveragedModel(model)
    names["batches"] = iter([batch, batch]) if "next(" in text else [batch, batch]
    test.globs = {**names, **{k: v for k, v in test.globs.items() if k not in names}}
    said: list[str] = []
    found = doctest.DocTestRunner(Shown(), optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not found.failed, "".join(said)


def test_there_are_as_many_as_before() -> None:
    assert len(blocks("README.md")) == 1
    assert len(blocks("notes/usage.md")) == 9
    assert len(blocks("notes/migrating.md")) == 5
