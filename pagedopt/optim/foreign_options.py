"""Names that other libraries have for what is here, and the line to write instead.  Nothing is imported for it."""

from __future__ import annotations

from collections.abc import Mapping

_PAGED = "write pagedopt.{0}(params, …, device_budget='auto'), or bytes or a share that stays on the device"
_PLAIN = "write pagedopt.{0}(params, …)"
_FEWER = (
    "state in {1} is not there yet: pagedopt.{0}(params, …, state_format='bfloat16', device_budget='auto') takes 16 "
    "and spills what has no room"
)
#: bitsandbytes' classes by how their names end.
_ENDS = {"32bit": _PAGED, "8bit": _FEWER, "": _PAGED}
_EIGHT = "8 bits"
#: Adam's decay is 0 unless it is told one, and goes through the gradient.
_COUPLED = "; a weight_decay other than 0 needs group['decoupled_weight_decay'] = False, too"

NAMES: dict[str, str] = {
    **{f"Paged{kind}{end}": text.format(f"Paged{kind}", _EIGHT)
       for kind in ("AdamW", "SGD", "Lion") for end, text in _ENDS.items() if end},
    **{f"{kind}{end}": (_FEWER if end == "8bit" else _PLAIN).format(f"Paged{kind}", _EIGHT)
       for kind in ("AdamW", "SGD", "Lion") for end in _ENDS},
    **{f"{paged}Adam{end}": text.format("PagedAdamW", _EIGHT).replace("…", "…, weight_decay=0", 1) + _COUPLED
       for paged, plain in (("Paged", _PAGED), ("", _PLAIN))
       for end, text in {**_ENDS, "": plain, "32bit": plain}.items()},
    "AdamW4bit": _FEWER.format("PagedAdamW", "4 bits"),
    "AdamWFp8": _FEWER.format("PagedAdamW", "8 bits"),
    "GlobalOptimManager": "leave it out: pagedopt.PagedAdamW(params, …, state_format='bfloat16') is of all state, and "
    "state_format={'exp_avg': 'bfloat16'} of one by its name",
    "CPUOffloadOptimizer": "write pagedopt.PagedAdamW(params, …, device_budget=0): all state is on the host, and the "
    "update still runs on the GPU",
}  # fmt: skip

OPTIONS: dict[str, str] = {
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
    """What to write instead, as the end of a message; "" if the name is nobody's."""
    return f": {known[name]}" if name in known else ""


__all__ = ["NAMES", "OPTIONS", "hint"]
