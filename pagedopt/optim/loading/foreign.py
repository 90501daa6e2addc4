"""State dicts of other libraries, in torch's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

#: What bitsandbytes calls the moments of Adam.
MOMENTS = {"state1": "exp_avg", "state2": "exp_avg_sq"}
#: In state dicts it wraps tensors in a dict of this name, so that FSDP leaves them alone.
WRAP = "__bnb_optimizer_quant_state__"
#: Workspace of its clipping of updates and of gradients.
SCRATCH = {"unorm_vec", "gnorm_vec"}
#: Hyperparameters of AdEMAMix that every two-state optimizer carries.
UNUSED = {"alpha", "t_alpha", "t_beta3"}


def translate(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The 32-bit state of bitsandbytes' Adam and AdamW, paged or not, as that of ``torch.optim.AdamW``.

    Returns:
        a new dict over the same tensors, or ``state_dict`` itself if it has none of bitsandbytes.

    Raises:
        ValueError: state is in 8 bits, or that of an optimizer with other moments than Adam's.
    """
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not any(map(_is_foreign, state.values())):
        return state_dict
    return {
        **state_dict,
        "state": {key: _translated(key, entry) if _is_foreign(entry) else entry for key, entry in state.items()},
        "param_groups": [{k: v for k, v in group.items() if k not in UNUSED} for group in groups],
    }


def _is_foreign(entry: Any) -> bool:
    return isinstance(entry, Mapping) and ("state1" in entry or WRAP in entry)


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
