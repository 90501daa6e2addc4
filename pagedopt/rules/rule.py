"""What a rule is: one Python function with three lives (CUDA functor, Numba loop, float64 reference)."""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from .language import parse, translate
from .language.functions import fma, sign, sqrt
from .language.source import RuleError


class Rule:
    """The update of one element, written once.

    Args:
        function: positional parameters are elements of tensors, keyword-only parameters are hyperparameters.  It
            returns the parameters that change, by name (or one expression, which overwrites the first parameter).

    Attributes:
        name: the function's name.
        inputs: names of the tensor lists it takes, in order.
        scalars: names of its hyperparameters; those in ``defaults`` may be left out.
        writes: indices of the lists it overwrites.

    Raises:
        RuleError: the function uses something that cannot be translated; the message names the line.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.program = parse.analyse(function)
        self._code = function.__code__
        self.name = self.program.name
        self.inputs = self.program.inputs
        self.scalars = self.program.scalars
        self.defaults = self.program.defaults
        self.writes = self.program.writes
        self.__doc__ = function.__doc__
        self._host = translate.host_function(self.program)
        self._base: Rule | None = None  # of an out-of-place variant

    def __repr__(self) -> str:
        return f"Rule({self.name}({', '.join(self.inputs)}, *, {', '.join(self.scalars)}))"

    def __deepcopy__(self, memo: dict[int, Any]) -> Rule:
        """Itself: a rule does not change, and compiled kernels are found by it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_find, (self.function.__module__, self.function.__qualname__, self._base is not None))

    def __call__(self, *elements: Any, **scalars: Any) -> Any:
        """The function itself, on Python scalars."""
        return self.function(*elements, **scalars)

    def check(self) -> None:
        """Whether the function still is what was translated; asked whenever the rule is about to be used.

        Raises:
            RuleError: its code was replaced, or a name that it calls now stands for something else.
        """
        if self.function.__code__ is not self._code:
            where = f"{self._code.co_filename}:{self._code.co_firstlineno}"
            raise RuleError(f"{where}: the code of rule {self.name!r} was replaced; make the new function a rule")
        for binding, where in self.program.calls:
            if not binding.holds():
                raise RuleError(f"{where}: rule {self.name!r} is no longer what was translated: {binding.complaint()}")

    def uniforms(self, scalars: Mapping[str, float]) -> list[float]:
        """What the kernel receives for these hyperparameters: every expression of them alone, computed in double.

        Raises:
            TypeError: a hyperparameter is missing or unknown.
            RuleError: see :meth:`check`.
        """
        self.check()
        try:
            return self._host(**{**self.defaults, **scalars})
        except TypeError as error:
            missing = [s for s in self.scalars if s not in scalars and s not in self.defaults]
            unknown = [s for s in scalars if s not in self.scalars]
            if not missing and not unknown:
                raise
            raise TypeError(
                f"rule {self.name!r} takes the scalars {list(self.scalars)}; missing {missing}, unknown {unknown}"
            ) from error

    def reference(self, *tensors: torch.Tensor, **scalars: float) -> tuple[torch.Tensor, ...]:
        """The rule on whole tensors, in their own dtype (use float64): the new value of each list in ``writes``."""
        self.check()
        result = self._reference(*tensors, **{**self.defaults, **scalars})
        results = result if isinstance(result, tuple) else (result,)
        writes = (self._base or self).writes
        return tuple(_filled(value, tensors[i]) for value, i in zip(results, writes, strict=True))

    @cached_property
    def _reference(self) -> Callable[..., Any]:
        return translate.reference_function(self.program, _TENSOR_FUNCTIONS)

    def cuda_source(self) -> str:
        """The generated CUDA C++ functor, as text to read."""
        return translate.cuda_functor(self.program)

    def numba_source(self, dtypes: Sequence[torch.dtype] | None = None) -> str:
        """The generated Python source of the CPU kernel for ``dtypes`` (default: all float32), as text to read."""
        from ..kernels import cpu

        return cpu.source(self, tuple(dtypes or [torch.float32] * len(self.inputs)))

    @cached_property
    def out_of_place(self) -> Rule:
        """The same rule with one more list per result, behind its inputs, that takes the result instead."""
        variant = Rule.__new__(Rule)
        variant.__dict__.update(self.__dict__)
        variant._base = self
        count = len(self.inputs)
        outs = tuple(f"out_{self.inputs[i]}" for i in self.writes)
        variant.program = dataclasses.replace(
            self.program,
            name=f"{self.name}_out",
            inputs=self.inputs + outs,
            writes=tuple(range(count, count + len(outs))),
        )
        variant.name, variant.inputs, variant.writes = (
            variant.program.name,
            variant.program.inputs,
            variant.program.writes,
        )
        return variant


def rule(function: Callable[..., Any]) -> Rule:
    """Decorator: make ``function`` a :class:`Rule`."""
    return Rule(function)


def _find(module: str, name: str, out_of_place: bool) -> Rule:
    """A rule by the name of its function: pickles hold no code."""
    found = operator.attrgetter(name)(importlib.import_module(module))
    base = found if isinstance(found, Rule) else Rule(found)
    return base.out_of_place if out_of_place else base


def _tensor(value: Any, like: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(value, dtype=like.dtype if isinstance(like, torch.Tensor) else torch.float64)


def _filled(value: Any, like: torch.Tensor) -> torch.Tensor:
    """``value`` for every element of ``like``; a tensor that has its shape is handed on."""
    if isinstance(value, torch.Tensor) and value.shape == like.shape:
        return value
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand_as(like).clone()


def _where(test: Any, yes: Any, no: Any) -> Any:
    if not isinstance(test, torch.Tensor):
        return yes if test else no
    like = yes if isinstance(yes, torch.Tensor) else no
    return torch.where(test.bool(), _tensor(yes, like), _tensor(no, like))


def _number(truth: Any, *terms: Any) -> Any:
    """0 and 1 in the dtype of the terms that were compared: torch does not subtract truths."""
    dtypes = [t.dtype for t in terms if isinstance(t, torch.Tensor)]
    return truth.to(dtypes[0]) if dtypes else truth


def _pairwise(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def call(a: Any, b: Any) -> Any:
        return function(_tensor(a, b), _tensor(b, a))

    return call


def _unary(function: Callable[..., Any]) -> Callable[[Any], Any]:
    def call(a: Any) -> Any:
        return function(_tensor(a, a))

    return call


_TENSOR_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": _unary(torch.sqrt),
    "abs": _unary(torch.abs),
    "sign": _unary(torch.sign),
    "exp": _unary(torch.exp),
    "log": _unary(torch.log),
    "min": _pairwise(torch.minimum),
    "max": _pairwise(torch.maximum),
    "fma": lambda a, b, c: a * b + c,
    "_where": _where,
    "_logical_and": _pairwise(torch.logical_and),
    "_logical_or": _pairwise(torch.logical_or),
    "_logical_not": _unary(torch.logical_not),
    "_number": _number,
    "_filled": _filled,
}

__all__ = ["Rule", "fma", "rule", "sign", "sqrt"]
