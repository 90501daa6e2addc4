"""Names of bitsandbytes and torchao, and what to write here instead.  Does not import those libraries or torch."""

from __future__ import annotations

from collections.abc import Mapping

_PAGED = "write pagedopt.{0}(params, …{1}, device_budget='auto'), or bytes or a share that stays on the device{2}"
_UNPAGED = "write pagedopt.{0}(params, …{1}){2}"
#: What 8 bits need, and what they leave.
_INT8 = ", state_format='int8'"
_SMALL = "; state of parameters below 4,096 elements is float32 (the default of min_8bit_size)"
_OTHER_BITS = (
    "state in {0} is not there yet: pagedopt.PagedAdamW(params, …, state_format='int8') takes 8 bits an element"
)

NAMES: dict[str, str] = {
    f"{prefix}{theirs}{suffix}": text.format(f"Paged{theirs}", eight, _SMALL * bool(eight))
    for theirs in ("AdamW", "Adam", "SGD", "Lion", "RMSprop")
    for prefix, text in (("Paged", _PAGED), ("", _UNPAGED))
    for suffix, eight in (("", ""), ("32bit", ""), ("8bit", _INT8))
    if (prefix, suffix) != ("Paged", "")
}
NAMES |= {
    "AdamW4bit": _OTHER_BITS.format("4 bits"),
    "AdamWFp8": _OTHER_BITS.format("fp8"),
    "GlobalOptimManager": "write a parameter group {'params': …, 'state_format': 'float32'} for parameters that it "
    "overrides to 32 bits, in pagedopt.PagedAdamW(params, …, state_format='int8')",
    "CPUOffloadOptimizer": "write pagedopt.PagedAdamW(params, …, device_budget=0): all state is on the host, and the "
    "update still runs on the GPU",
}

_NEEDS = {
    "a norm of each tensor": ("LAMB", "LARS"), "sums of rows and columns": ("Adafactor",),
    "products of matrices": ("Muon", "SOAP", "Shampoo"),
}  # fmt: skip
#: Optimizers that are no rule, and why.
NO_RULES: dict[str, str] = {
    f"{prefix}{name}{bits}": f"it needs {what}, and a rule sees one element; notes/optimizers.md says what to call"
    for what, names in _NEEDS.items()
    for name in names
    for prefix in ("", "Paged")
    for bits in ("", "8bit", "32bit")
}

OPTIONS: dict[str, str] = {
    "learning_rate": "write lr=…",
    "budget": "write device_budget=…",
    "memory_budget": "write device_budget=…",
    "overlap": "call optimizer.attach(model): the update then runs under the next forward",
    "decoupled_weight_decay": "write it into parameter groups: {'params': …, 'decoupled_weight_decay': False}",
    "optim_bits": "write state_format='int8' for 8 bits, 'float32' for 32 (None: as the parameter)",
    "is_paged": "leave it out: device_budget='auto' (or bytes, or a share) says what stays on the device",
    "percentile_clipping": "it is not there: max_grad_norm=… clips by the norm of all gradients",
    "block_wise": "leave it out: state_format='int8' always scales by blocks, of 256 elements",
    "block_size": "leave it out: a block of state_format='int8' has 256 elements",
    "min_8bit_size": "leave it out: with state_format='int8', state of parameters below 4,096 elements is float32; a "
    "parameter group with state_format='float32' exempts larger ones",
    "bf16_stochastic_round": "write param_rounding='stochastic'",
    "kahan_sum": "write param_format='bfloat16+16', which keeps all that bfloat16 loses, or 'bfloat16+8'",
    "master_weights": "write param_format='bfloat16+16', which keeps what bfloat16 loses of float32",
    "master_weight_bits": "write param_format='bfloat16+8' for 24 bits, 'bfloat16+16' for 32",
    "store_param_remainders": "write param_format='bfloat16+16'",
    "offload_gradients": "it is not there: gradients stay where they are; device_budget=0 has all state on the host",
    "minimal_size": "leave it out: small parameters are updated in the same launch as large ones",
    "optimizer_class": "write pagedopt.PagedAdamW(params, …, device_budget=0) in place of the wrapper and its class",
    "pin_memory": "leave it out: state on the host is page-locked",
    "offload": "write device_budget=0: all state is on the host",
}


def hint(known: Mapping[str, str], name: str) -> str:
    """Return ": " and what to write instead of ``name``, or "" if ``known`` lacks it."""
    return f": {known[name]}" if name in known else ""


__all__ = ["NAMES", "NO_RULES", "OPTIONS", "hint"]
