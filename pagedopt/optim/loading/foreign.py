"""Translate state dicts of bitsandbytes into those of torch; refuse state of torchao in fewer bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

#: bitsandbytes' names for Adam's moments, and torch's.
MOMENTS = {"state1": "exp_avg", "state2": "exp_avg_sq"}
#: Key of a dict in which bitsandbytes wraps the tensors of an entry, so that FSDP leaves them alone.
WRAP = "__bnb_optimizer_quant_state__"
#: Workspaces for clipping updates and gradients.
SCRATCH = {"unorm_vec", "gnorm_vec"}
#: Hyperparameters of AdEMAMix that every two-state optimizer carries.
UNUSED = {"alpha", "t_alpha", "t_beta3"}


def translate(state_dict: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return 32-bit state of bitsandbytes' Adam or AdamW, paged or not, as a state dict of ``torch.optim.AdamW``.

    It is a new dict over the same tensors, or ``state_dict`` itself if nothing in it comes from bitsandbytes: a
    parameter's entry with state of the optimizer's ``own`` names does not.

    Raises:
        ValueError: state is in 8 bits (of torchao: in 8 or 4), or its moments are not Adam's.
    """
    state, groups = state_dict["state"], state_dict["param_groups"]
    keys = {key for group in groups for key in group["params"]}
    entries = {key: entry for key, entry in state.items() if key in keys}
    for key, entry in entries.items():
        _refuse_torchao(key, entry)
    foreign = {key: _translated(key, entry) for key, entry in entries.items() if _is_foreign(entry, own)}
    if not foreign:
        return state_dict
    return {
        **state_dict,
        "state": {key: foreign.get(key, entry) for key, entry in state.items()},
        "param_groups": [{k: v for k, v in group.items() if k not in UNUSED} for group in groups],
    }


def _refuse_torchao(key: Any, entry: Any) -> None:
    for name, value in entry.items() if isinstance(entry, Mapping) else ():
        if isinstance(value, torch.Tensor) and type(value).__module__.partition(".")[0] == "torchao":
            raise ValueError(
                f"loaded {name} of parameter {key} is torchao's {type(value).__name__}, which is not read. Expand it "
                f"first: {name} = {name}.dequantize()"
            )


def _is_foreign(entry: Any, own: Collection[str]) -> bool:
    return isinstance(entry, Mapping) and ("state1" in entry or WRAP in entry) and not any(n in entry for n in own)


def _translated(key: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    flat = {**{k: v for k, v in entry.items() if k != WRAP}, **entry.get(WRAP, {})}
    if any(isinstance(flat.get(name), torch.Tensor) and flat[name].dtype == torch.uint8 for name in MOMENTS):
        raise ValueError(
            f"loaded state of parameter {key} is that of an 8-bit optimizer of bitsandbytes, of which only 32-bit "
            "state is read. Expand it first: exp_avg = qmap1[state1.long()] times absmax1 of its block of 256 elements "
            "(bitsandbytes.functional.dequantize_blockwise), exp_avg_sq from state2 in the same way"
        )
    if "state1" not in flat or "state2" not in flat:
        raise ValueError(
            f"loaded state of parameter {key} is that of an optimizer of bitsandbytes with one moment; only Adam and "
            "AdamW are read"
        )
    return {MOMENTS.get(name, name): value for name, value in flat.items() if name not in SCRATCH}
