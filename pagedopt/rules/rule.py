"""``Rule``: one Python function on scalars, translated to a CUDA functor, a Numba loop and a reference on tensors."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from ..formats.choice import Moment
from .language import cuda, cuda_prologue, host_expressions, numba, reference
from .language.function_syntax import RuleError
from .language.functions import fma, sign, sqrt
from .language.parse import Program, analyse

#: Below this number of sets, computing one set after another is faster than NumPy.
FEW = 8
#: A hyperparameter of several sets: one value for all sets, or a float64 array with one value per set.
Column = float | npt.NDArray[np.float64]


class Rule:
    """The update of one element, written once.

    Args:
        function: positional parameters are elements of tensors, keyword-only parameters are hyperparameters.  It
            returns the parameters that change, by name (or one expression, which overwrites the first parameter).
            If it returns a hyperparameter, too, an optimizer stores that number for each of its parameters from step
            to step; the new value may depend on hyperparameters alone.  Plain functions that it calls are inlined.
        program: the translation of ``function``; None: translate it now.
        moments: what is known of its states, by name (see :class:`~pagedopt.Moment`).

    Attributes:
        function: the function.
        program: its translation.
        name: the function's name.
        inputs: names of the tensor lists it takes, in order.
        scalars: names of its hyperparameters; those in ``defaults`` may be left out.
        defaults: values of hyperparameters that are left out.
        carried: the hyperparameters that it returns: name → index of the new value in :meth:`uniforms`.
        writes: indices of the lists it overwrites.
        functor, prologue: names of the structs in :meth:`cuda_source` and :meth:`prologue_source`.

    Raises:
        RuleError: the function uses something that cannot be translated; the message names the line.
        ValueError: ``moments`` names what is no state or hyperparameter of the rule.
        TypeError: one of ``moments`` is no :class:`~pagedopt.Moment`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        program: Program | None = None,
        moments: Mapping[str, Moment] = MappingProxyType({}),
    ) -> None:
        self.function = function
        self.program = program = program or analyse(function)
        self.name, self.functor, self.prologue = program.name, program.functor, program.prologue
        self.inputs, self.writes = program.inputs, program.writes
        self.scalars, self.defaults, self.carried = program.scalars, program.defaults, program.carried
        self.__doc__ = function.__doc__
        self._host = host_expressions.host_function(program)
        self.moments = dict(moments)
        self._check_moments()

    def _check_moments(self) -> None:
        for name, moment in self.moments.items():
            if not isinstance(moment, Moment):
                raise TypeError(f"rule {self.name!r}: moments[{name!r}] is {moment!r}; give a pagedopt.Moment")
            if name not in self.inputs[2:]:
                states = ", ".join(self.inputs[2:]) or "none"
                raise ValueError(
                    f"rule {self.name!r}: moments names {name!r}, which is no state of it; there is {states}"
                )
            if moment.decay is not None and moment.decay not in self.scalars:
                raise ValueError(
                    f"rule {self.name!r}: the decay of {name!r} is {moment.decay!r}, which is no hyperparameter of it; "
                    f"there is {', '.join(self.scalars)}"
                )

    @property
    def reads(self) -> tuple[int, ...]:
        """Indices of the lists it reads."""
        return tuple(sorted(self.program.reads))

    @property
    def assigned(self) -> frozenset[str]:
        """Names that it assigns."""
        return frozenset(name for name, _ in self.program.statements)

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of the inputs that it assigns and does not return."""
        changes = self.program.changes
        return tuple(name for i, name in enumerate(self.inputs) if i not in changes and name in self.assigned)

    @property
    def uniform_count(self) -> int:
        """How many numbers a kernel receives for one set of hyperparameters."""
        return len(self.program.uniforms)

    def __repr__(self) -> str:
        return f"Rule({self.name}({', '.join(self.inputs)}, *, {', '.join(self.scalars)}))"

    def __deepcopy__(self, memo: dict[int, Any]) -> Rule:
        """Return the rule itself: it does not change, and caches of compiled kernels are keyed by it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        out_of_place = self.program.writes != self.program.changes
        return (_find, (self.function.__module__, self.function.__qualname__, out_of_place))

    def __call__(self, *elements: Any, **scalars: Any) -> Any:
        """Call the function on Python scalars."""
        return self.function(*elements, **scalars)

    def check(self) -> None:
        """Check that the function is still what was translated; every use of the rule calls this first.

        Raises:
            RuleError: its code or that of a function it calls was replaced, or a name that one of them calls now
                stands for something else.
        """
        if not self.program.dependencies.unchanged():
            change = self.program.dependencies.first_change()
            raise RuleError(f"rule {self.name!r} is no longer what was translated: {change}")

    def uniforms(self, scalars: Mapping[str, float]) -> list[float]:
        """Return the numbers that a kernel receives: every expression of hyperparameters alone, computed in double.

        Raises:
            TypeError: a hyperparameter is missing, unknown or no number.
            RuntimeError: an expression is the root of a negative number.
            ArithmeticError, ValueError: as Python for an expression, e.g. a division by zero; the message names it.
            RuleError: see :meth:`check`.
        """
        if not self.program.dependencies.unchanged():
            self.check()
        try:
            if str in map(type, scalars.values()):  # else 2 * "1" is "11", and float("11") is a number
                raise TypeError("a text is no number")
            return [*map(float, self._host(**scalars))]
        except (ArithmeticError, TypeError, ValueError) as error:
            self._explain(scalars, error)
            raise

    def uniform_sets(self, scalars: Mapping[str, Column]) -> npt.NDArray[np.float64]:
        """Return :meth:`uniforms` of several sets of hyperparameters at once, with the same bits.

        Args:
            scalars: by name a number, for all sets, or a float64 array of one number per set; at least one is an array.

        Returns:
            float64 (sets, uniforms)

        Raises:
            as :meth:`uniforms` for one of the sets.
        """
        sets = max(len(value) for value in scalars.values() if isinstance(value, np.ndarray))
        out = np.empty((sets, self.uniform_count))
        if sets >= FEW:
            self.check()
            try:
                with host_expressions.strict():
                    for i, column in enumerate(self._columns(**scalars)):
                        if isinstance(column, np.ndarray) and column.dtype.kind != "f":
                            column = column.astype(np.float64, casting="safe")  # raises for complex numbers
                        out[:, i] = column
                return out
            except (ArithmeticError, TypeError, ValueError):
                pass  # a set is at fault, or only NumPy raises: computing set by set below decides
        for i in range(sets):
            out[i] = self.uniforms(
                {name: float(v[i]) if isinstance(v, np.ndarray) else v for name, v in scalars.items()}
            )
        return out

    @cached_property
    def _columns(self) -> host_expressions.Host:
        return host_expressions.columns_function(self.program)

    def _explain(self, values: Mapping[str, float], error: Exception) -> None:
        """Raise what :meth:`uniforms` documents: an error that names the hyperparameter or expression at fault."""
        missing = [s for s in self.scalars if s not in values and s not in self.defaults]
        unknown = [s for s in values if s not in self.scalars]
        if missing or unknown:
            tensors = [s for s in unknown if s in self.inputs]
            raise TypeError(
                f"rule {self.name!r} takes the scalars {list(self.scalars)}; missing {missing}, unknown {unknown}"
                + (f": {self.before_star(tensors)}" if tensors else "")
            ) from error
        for name, value in values.items():
            if not _is_number(value):
                raise TypeError(f"rule {self.name!r}: the scalar {name!r} is {value!r}; give a number") from error
        text, value = host_expressions.first_failure(self.program, values)
        given = ", ".join(f"{name}={v!r}" for name, v in values.items())
        if isinstance(value, complex):
            raise RuntimeError(f"rule {self.name!r}: {text} has the root of a negative number; {given}") from error
        if isinstance(value, ArithmeticError | ValueError):
            raise type(value)(f"rule {self.name!r}: {value} in {text!r}; {given}") from error

    def before_star(self, names: Sequence[str]) -> str:
        """Return the part of an error message that says why ``names`` are tensors and not hyperparameters."""
        return (
            f"in rule {self.name!r} {', '.join(map(repr, names))} stands before the '*' (or there is none), and so is "
            "a tensor"
        )

    def reference(self, *tensors: torch.Tensor, **scalars: float) -> tuple[torch.Tensor, ...]:
        """Compute the rule on whole tensors, in their dtype (use float64): a new value for each list in ``writes``."""
        self.check()
        results = zip(self._reference(*tensors, **scalars), self.program.changes, strict=True)
        return tuple(reference.filled(value, tensors[i]) for value, i in results)

    @cached_property
    def _reference(self) -> Callable[..., tuple[Any, ...]]:
        return reference.reference_function(self.program)

    def cuda_source(self) -> str:
        """Return the generated CUDA C++ functor."""
        return cuda.cuda_functor(self.program)

    def prologue_source(self) -> str:
        """Return the generated CUDA C++ of :meth:`uniforms` (see :func:`language.cuda_prologue.cuda_prologue`)."""
        return cuda_prologue.cuda_prologue(self.program)

    def numba_lines(self, load: Sequence[str], store: Sequence[str]) -> list[str]:
        """Return the generated statements of the CPU kernel's loop (see :func:`language.numba.numba_lines`)."""
        return numba.numba_lines(self.program, load, store)

    def numba_source(self, dtypes: Sequence[torch.dtype] | None = None) -> str:
        """Return the generated Python source of the CPU kernel for ``dtypes`` (default: all float32)."""
        from ..formats.floating import of_dtype
        from ..kernels import cpu_text

        return cpu_text.source(self, tuple(map(of_dtype, dtypes or [torch.float32] * len(self.inputs))))

    @cached_property
    def out_of_place(self) -> Rule:
        """The rule with one more list per result, after its inputs; results go there, and the inputs stay unchanged."""
        return Rule(self.function, self.program.out_of_place(), self.moments)


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a number, or a tensor or array of one element."""
    try:
        float(value)
    except OverflowError:  # an int too large for a float
        return True
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, str | bytes)


def check_rule(given: Any) -> None:
    """Raise TypeError unless ``given`` is a :class:`Rule`."""
    if not isinstance(given, Rule):
        found = f"the function {given.__name__!r}" if callable(given) and hasattr(given, "__name__") else repr(given)
        raise TypeError(f"rule is {found}; a rule is a function decorated with pagedopt.rule: decorate it")


@overload
def rule(function: Callable[..., Any]) -> Rule: ...
@overload
def rule(*, moments: Mapping[str, Moment]) -> Callable[[Callable[..., Any]], Rule]: ...


def rule(
    function: Callable[..., Any] | None = None, *, moments: Mapping[str, Moment] = MappingProxyType({})
) -> Rule | Callable[[Callable[..., Any]], Rule]:
    """Decorator: make ``function``, the update of one element, a :class:`Rule`.

    Positional parameters are elements of tensor lists (for an optimizer: parameter, gradient, then state by name),
    keyword-only ones hyperparameters, of which some may have numbers as defaults.  The body is assignments and one
    ``return`` of the positional parameters that change (or of one expression, which overwrites the first): arithmetic,
    ``**``, comparisons, ``and``, ``or``, ``not``, ``a if test else b``, and calls of ``abs``, ``min``, ``max``, of
    ``sqrt``, ``exp`` and ``log`` from ``math``, of ``sign`` and ``fma`` from :mod:`pagedopt.rules`, and of plain
    functions of the same kind, which are inlined.  What depends on hyperparameters alone is computed once per step on
    the host, in double; everything else in float32, or in float64 if a list is float64.  So is a comparison with 0,
    such as ``weight_decay != 0``: the kernel has the number anyway.

    Parameters and variables must not have reserved names: ``u``, ``u0``, ``u1``, …, ``S``, ``out``, ``range``, names
    that begin with ``_``, the functions above, and words of C++ that Python lacks (``new``, ``double``, …).

    Args:
        moments: for each state that may be stored in 8 bits or in float16, whether it may be negative, by what it
            decays, and whether it holds squares.

    Raises:
        RuleError: it uses something else, its source cannot be found, or a name stands for another function; the
            message begins with file and line.

    Example:
        >>> @pagedopt.rule
        ... def signum(param, grad, momentum_buffer, *, lr, momentum=0.9):
        ...     momentum_buffer = momentum * momentum_buffer + (1 - momentum) * grad
        ...     param = param - lr * sign(momentum_buffer)
        ...     return param, momentum_buffer
    """
    if function is None:
        return lambda function: Rule(function, moments=moments)
    return Rule(function, moments=moments)


def _find(module: str, name: str, out_of_place: bool) -> Rule:
    """Find a rule by the name of its function: pickles of rules hold no code."""
    found = operator.attrgetter(name)(importlib.import_module(module))
    base = found if isinstance(found, Rule) else Rule(found)
    return base.out_of_place if out_of_place else base


__all__ = ["Rule", "check_rule", "fma", "rule", "sign", "sqrt"]
