"""Its reference, the paper's lines in plain torch, for references.py, and its entry, for specs.py."""

from tests.specs import _ADAMW, _OTHER, _written


def _adabelief(g, x, m, s, *, t, lr, betas, eps, weight_decay):  # type: ignore[no-untyped-def]
    """Algorithm 2."""
    b1, b2 = betas
    m = m.lerp(g, 1 - b1)
    s = b2 * s + (1 - b2) * (g - m) ** 2 + eps
    change = lr / (1 - b1**t) * m / ((s / (1 - b2**t)).sqrt() + eps)
    return {"x": x * (1 - lr * weight_decay) - change, "exp_avg": m, "exp_avg_var": s}


ADABELIEF = _written("PagedAdaBelief", _adabelief, _ADAMW, _OTHER, {"maximize": True}, decoupled=True, often=True)
