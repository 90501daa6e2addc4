"""An optimizer with float32 state, which NumPy decodes before each step and encodes after it: int8's oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import int8_oracle as oracle
import torch
from int8_oracle import Array, Draw
from int8_support import same

#: What a group may have for itself; the rest goes to the float32 optimizer.
OWN = ("state_format", "rounding", "seed")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class Twin:
    """What ``kind(groups, state_format="int8", …)`` should do to copies of its parameters.

    Attributes:
        params: copies of the parameters, group by group.
        columns: by index of the parameter and name of the state, the columns (codes, absmax).
    """

    def __init__(self, kind: Any, groups: Sequence[dict[str, Any]], **options: Any) -> None:
        own = {name: options.pop(name) for name in OWN if name in options}
        self.params = [torch.nn.Parameter(p.detach().clone()) for group in groups for p in group["params"]]
        self.own: list[dict[str, Any]] = []
        plain, copies = [], iter(self.params)
        for group in groups:
            mine = {**own, **{name: group[name] for name in OWN if name in group}}
            plain.append({name: value for name, value in group.items() if name not in OWN})
            plain[-1]["params"] = [next(copies) for _ in group["params"]]
            self.own += [mine] * len(group["params"])
        self.opt = kind(plain, state_format="float32", **options)
        self.columns: dict[tuple[int, str], tuple[Array, Array]] = {}

    def step(self) -> None:
        """One step: decode, update, encode."""
        for (i, name), (codes, absmax) in self.columns.items():
            values = oracle.decode(4 if "sq" in name else 3, codes, absmax)
            flat(self.opt.state[self.params[i]][name]).copy_(torch.from_numpy(values))
        self.opt.step()
        groups = [group for group in self.opt.param_groups for _ in group["params"]]
        for i, (p, group) in enumerate(zip(self.params, groups, strict=True)):
            if p.grad is None or p.numel() < 4096 or self.own[i].get("state_format") == "float32":
                continue
            names = self.opt.rule_of(group).inputs
            for name in names[2:]:
                values = flat(self.opt.state[p][name]).numpy()
                self.columns[i, name] = self._encode(values, i, name, names.index(name), group)

    def _encode(self, values: Array, i: int, name: str, index: int, group: dict[str, Any]) -> tuple[Array, Array]:
        root, own = 4 if "sq" in name else 3, self.own[i]
        usual = "stochastic" if root == 3 or group["betas"][1] >= 0.99 else "nearest"
        if name == "max_exp_avg_sq" or (own.get("rounding") or usual) == "nearest":
            return oracle.encode(root, values)
        step = self.opt.state[self.params[i]].get("step")
        return oracle.encode(root, values, Draw(own.get("seed", 0), None if step is None else int(step), i, index))

    def differences(self, opt: Any) -> list[str]:
        """Where an optimizer's parameters and state have other bits than these."""
        found = []
        params = [p for group in opt.param_groups for p in group["params"]]
        for i, (mine, p) in enumerate(zip(self.params, params, strict=True)):
            want: dict[str, Any] = {"parameter": mine.detach()}
            for name, value in self.opt.state.get(mine, {}).items():
                if (i, name) in self.columns:
                    codes, absmax = self.columns[i, name]
                    kind = "root4" if "sq" in name else "root3"
                    want |= {f"{name}.{kind}": torch.from_numpy(codes), f"{name}.absmax": torch.from_numpy(absmax)}
                else:
                    want[name] = value
            got = {"parameter": p.detach(), **opt.state.get(p, {})}
            if want.keys() != got.keys():
                found.append(f"parameter {i} has {list(got)}, not {list(want)}")
            found += [
                f"{name} of parameter {i}" for name in want.keys() & got.keys()
                if not same([flat(want[name])], [flat(got[name])])
            ]  # fmt: skip
        return sorted(found)
