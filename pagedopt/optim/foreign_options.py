"""Names of bitsandbytes and torchao, and what to write here instead.  Does not import those libraries or torch."""

from __future__ import annotations

from collections.abc import Mapping

_PAGED = "write pagedopt.{0}(params, …{1}, device_budget='auto'), or bytes or a share that stays on the device{2}"
_PLAIN = "write pagedopt.{0}(params, …{1}){2}"
_FEWER = (
    "state in {bits} is not there yet: pagedopt.{0}(params, …{1}, state_format='bfloat16', device_budget='auto') takes "
    "16 and spills what has no room{2}"
)
_COUPLED = "; a weight_decay other than 0 needs group['decoupled_weight_decay'] = False, too"
#: By kind of optimizer: the class here, an argument that it needs, and a remark.
_KINDS = {kind: (f"Paged{kind}", "", "") for kind in ("AdamW", "SGD", "Lion")}
_KINDS["Adam"] = ("PagedAdamW", ", weight_decay=0", _COUPLED)  # its decay is 0 by default, and added to the gradient

NAMES: dict[str, str] = {
    f"{prefix}{kind}{suffix}": (_FEWER if suffix == "8bit" else text).format(*ours, bits="8 bits")
    for kind, ours in _KINDS.items()
    for prefix, text in (("Paged", _PAGED), ("", _PLAIN))
    for suffix in ("", "32bit", "8bit")
    if f"{prefix}{kind}{suffix}" != ours[0]
}
NAMES |= {
    "AdamW4bit": _FEWER.format(*_KINDS["AdamW"], bits="4 bits"),
    "AdamWFp8": _FEWER.format(*_KINDS["AdamW"], bits="8 bits"),
    "GlobalOptimManager": "leave it out: pagedopt.PagedAdamW(params, …, state_format='bfloat16') is of all state, and "
    "state_format={'exp_avg': 'bfloat16'} of one by its name",
    "CPUOffloadOptimizer": "write pagedopt.PagedAdamW(params, …, device_budget=0): all state is on the host, and the "
    "update still runs on the GPU",
}

OPTIONS: dict[str, str] = {
    "learning_rate": "write lr=…",
    "optim_bits": "write state_format='float32' or 'bfloat16' (None: as the parameter); 8 bits are not there yet",
    "is_paged": "leave it out: device_budget='auto' (or bytes, or a share) says what stays on the device",
    "percentile_clipping": "it is not there: torch.nn.utils.clip_grad_norm_(model.parameters(), …) before step() clips",
    "block_wise": "leave it out: it is of state in 8 bits, which is not there yet",
    "min_8bit_size": "leave it out: it is of state in 8 bits, which is not there yet",
    "offload_gradients": "it is not there: gradients stay where they are; device_budget=0 has all state on the host",
    "minimal_size": "leave it out: small parameters are updated in the same launch as large ones",
    "optimizer_class": "write pagedopt.PagedAdamW(params, …, device_budget=0) in place of the wrapper and its class",
    "pin_memory": "leave it out: state on the host is page-locked",
    "offload": "write device_budget=0: all state is on the host",
}


def hint(known: Mapping[str, str], name: str) -> str:
    """Return ": " and what to write instead of ``name``, or "" if ``known`` lacks it."""
    return f": {known[name]}" if name in known else ""


__all__ = ["NAMES", "OPTIONS", "hint"]
