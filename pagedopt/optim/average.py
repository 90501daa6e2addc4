"""``ema``: an average of the weights that the same sweep updates, by a rule behind that of any optimizer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from numbers import Real

from ..formats.choice import Moment
from ..formats.floating import AVERAGE
from ..rules import Rule, compose, fma, rule
from ..rules.compose import unrounded


@rule(moments={AVERAGE: Moment(weights=True)})
def averaging(param, grad, param_ema, *, ema_decay, step):  # type: ignore[no-untyped-def]
    """``lerp`` of torch, which takes this form where its weight is below a half; the first average is a copy."""
    param_ema = param if step == 1 else fma(1 - ema_decay, param - param_ema, param_ema)
    return param_ema


@dataclass(frozen=True)
class Ema:
    """What ``after`` does behind each update; see :func:`ema`."""

    decay: float

    def behind(self, of: Rule, drawn: bool) -> Rule:
        """Return the rule that updates and then averages.

        Args:
            of: the rule that updates.
            drawn: whether parameters are rounded at random: then it averages what they were before.

        Raises:
            ValueError: the rule has a state of the average's name.
        """
        return _behind(of, drawn)


@functools.cache
def _behind(of: Rule, drawn: bool) -> Rule:
    if AVERAGE in getattr(of, "inputs", ()):
        raise ValueError(f"rule {of.name!r} has a state {AVERAGE!r}, which after=ema(…) adds: rename it")
    both = compose(of, averaging)
    return unrounded(both) if drawn else both


def ema(decay: float) -> Ema:
    """Return what the option ``after`` takes: an exponential moving average of the weights.

    Each step updates it in the same sweep: ``average += (1 - decay) * (parameter - average)``.  The first update of a
    parameter makes it, as a copy.  For float32 parameters it is torch's, to the bit::

        torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    as long as every parameter steps and the decay is above 0.5.  Torch averages the parameters without a gradient, too;
    a step does not read them.  Buffers of the model are not averaged.

    The average is state, under the key ``param_ema``: paged, saved and loaded.  It is float32 in any ``state_format``
    that does not name it (float64 for float64 parameters), and shaped as the parameter.  Groups have the decay under
    ``ema_decay``, where it may be changed between steps.  With ``param_rounding="stochastic"`` it averages parameters
    as they were before they were rounded, whose mean is the same.

    Args:
        decay: the share of the average that a step keeps, from 0 to 1.

    Raises:
        TypeError: it is no number.
        ValueError: it is below 0 or above 1.

    Example:
        >>> optimizer = pagedopt.PagedAdamW(model.parameters(), after=pagedopt.ema(0.999))
        >>> train(model, optimizer)
        >>> with optimizer.averaged():
        ...     evaluate(model)
    """
    if isinstance(decay, bool) or not isinstance(decay, Real):
        raise TypeError(f"decay is {decay!r}; it must be a number from 0 to 1, as 0.999")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay is {decay!r}; it must be from 0 to 1, as 0.999")
    return Ema(float(decay))
