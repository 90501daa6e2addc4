"""Formats that depend on the state: what a rule says about its states, and how a choice among formats asks for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from .format import Format

#: How moments are rounded; None: first moments stochastically, second ones by their decay.
Rounding = Literal["nearest", "stochastic"] | None


WEIGHTS = "it holds weights, and neighbouring codes are 2.4 % apart or more, far beyond what a step changes"


@dataclass(frozen=True)
class Moment:
    """What a rule says about one of its states, for formats that store fewer bits than they compute in.

    Attributes:
        signed: whether it may be negative.
        decay: the name of the hyperparameter by which it is multiplied in each step; None: it does not decay.
        squares: whether it holds squares of gradients, as a sum, mean or maximum, of which float16 loses the small
            ones.  None: not said, for a state that is not signed; one that is holds none.
        exact: why codes of 8 bits cannot stand for it, for an error message; "" if they can.
        weights: whether it holds weights, which a step changes by little: it is float32 unless a format is named, and
            has no 8 bits.

    Raises:
        ValueError: it is signed and holds squares.

    Example:
        >>> @pagedopt.rule(moments={"level": pagedopt.Moment(signed=False, decay="beta", squares=True)})
        ... def root_mean(param, grad, level, *, lr, beta):
        ...     level = beta * level + (1 - beta) * grad * grad
        ...     return param - lr * grad / (level.sqrt() + 1e-8), level
    """

    signed: bool = True
    decay: str | None = None
    squares: bool | None = None
    exact: str = ""
    weights: bool = False

    def __post_init__(self) -> None:
        if self.signed and self.squares:
            raise ValueError("a Moment is signed and holds squares, which are not negative; give it signed=False")
        if self.signed:
            object.__setattr__(self, "squares", False)
        if self.weights and not self.exact:
            object.__setattr__(self, "exact", WEIGHTS)


@dataclass(frozen=True)
class State:
    """A state of one parameter.

    Attributes:
        name: of the state.
        numel: elements of the parameter (of a DTensor, of the whole one).
        rule: the rule's name.
        moment: what the rule says about it; None: nothing.
        decay: the value of its decay; None: it has none, or it is not known here.
        rounding: what the option ``rounding`` asks for.
        counted: whether its optimizer counts steps.
    """

    name: str
    numel: int
    rule: str = ""
    moment: Moment | None = None
    decay: float | None = None
    rounding: Rounding = None
    counted: bool = True


class Choice(ABC):
    """A value of ``state_format`` that stands for several formats.

    Attributes:
        formats: those that have columns of different names.
    """

    name: str
    formats: tuple[Format, ...] = ()

    @abstractmethod
    def of(self, state: State) -> Format | torch.dtype:
        """Return the format of a state; a dtype stands for its plain numbers.

        Raises:
            ValueError: it cannot store this state.
        """
