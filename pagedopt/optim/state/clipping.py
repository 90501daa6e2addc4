"""``max_grad_norm`` and ``grad_norm``: clipping by the global norm, as attributes of an optimizer."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch

from ...launch.factor import Factor


class ClippingOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps may clip gradients, and divide them by the scale of the loss."""

    _max_grad_norm: float | None = None
    #: Whether a ``GradScaler`` has scaled a step: from then on what is counted in steps is counted on the device.
    scaled: bool = False
    #: By what gradients are multiplied on each device; of captured steps their graphs own others.
    factors: dict[torch.device, Factor]
    #: Those of the last step that has clipped, or was captured.
    clipped_by: dict[torch.device, Factor]
    #: The record of the last step; None: the next one is prepared anew.
    _launches: Any = None

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which a step clips the gradients of all its parameters together; None: it does not.

        It may be set between steps.  A step computes with gradients that are multiplied as ``clip_grad_norm_`` would
        multiply them, but it does not write them.

        Raises:
            TypeError, ValueError: it is set to what is no number above 0, or None.
            RuntimeError: it is set while steps are taken within backwards (``attach(model, overlap="backward")``).
        """
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        checked = checked_max_norm(value)
        if checked is not None and self.unclippable:
            raise RuntimeError(f"max_grad_norm is set to {checked}: {self.unclippable}")
        if (checked is None) is not (self._max_grad_norm is None):
            self._launches = None  # other kernels
        self._max_grad_norm = checked

    @property
    def unclippable(self) -> str:
        """Why gradients cannot be clipped, for an error message; "" if they can."""
        return ""

    @property
    def multiplies_gradients(self) -> bool:
        """Whether steps multiply gradients, to clip them or to undo a scale; other kernels do that."""
        return self._max_grad_norm is not None or self.scaled

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients in the last step with ``max_grad_norm``, before clipping; None: there was none.

        Where a ``GradScaler`` scales, it is that of the gradients divided by the scale.  It is a new tensor each time,
        float64 of no dimensions on the device of the first parameter, and nothing waits for it.  After a replay of a
        CUDA graph with such a step it is the replay's.  It is infinite or NaN where a gradient was; it stays as it was
        once ``max_grad_norm`` is None.

        Example:
            >>> optimizer = pagedopt.PagedAdamW(model.parameters(), max_grad_norm=1.0)
            >>> loss.backward()
            >>> optimizer.step()
            >>> norms.append(optimizer.grad_norm)  # .item() would wait for the device
        """
        factor = next(iter(self.clipped_by.values()), None)
        return None if factor is None else factor.norm()


def checked_max_norm(value: Any) -> float | None:
    """Return a norm to clip to as a float, or None.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"max_grad_norm is {value!r}; it must be a number above 0, or None: gradients are not clipped")
    if math.isnan(value) or value <= 0:
        raise ValueError(f"max_grad_norm is {value!r}; it must be above 0; None: gradients are not clipped")
    return float(value)


__all__ = ["ClippingOptimizer", "checked_max_norm"]
