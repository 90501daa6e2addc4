"""``Rule``: one Python function on scalars, traced to a CUDA functor, a Numba loop and a reference on tensors."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import operator
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from ..formats.choice import Moment
from .language import printers
from .language.operations import exp, fma, log, sign, sqrt, strict, tanh
from .language.syntax import Signature, signature_of, source_of
from .language.trace import Node, Trace

#: Below this number of sets, computing one set after another is faster than NumPy.
FEW = 8
#: A hyperparameter of several sets: one value for all sets, or a float64 array with one value per set.
Column = float | npt.NDArray[np.float64]


_tracing = threading.RLock()


class Rule(Signature):
    """The update of one element, written once.

    Args:
        function: positional parameters are elements of tensors, keyword-only parameters are hyperparameters.  It
            returns new values of parameters (see :func:`rule`).
            If it returns a hyperparameter, too, an optimizer stores that number for each of its parameters from step
            to step, in float32 as torch stores step counts; the new value may depend on hyperparameters alone.
        moments: what is known of its states, by name (see :class:`~pagedopt.Moment`).
        signature: what is known of ``function``; left out: what its source says.
        parts: the rules that it is made of (see :func:`pagedopt.compose`).

    Attributes:
        function: the function.
        name: the function's name.
        inputs: names of the tensor lists it takes, in order.
        scalars: names of its hyperparameters; those in ``defaults`` may be left out.
        defaults: values of hyperparameters that are left out.
        changes: for each returned element, the index of the input whose new value it is.
        writes: indices of the lists it overwrites.
        assigned: names that it assigns.
        functor, prologue: names of the structs in :meth:`cuda_source` and :meth:`prologue_source`.
        registered: the name by which operators of ``torch.ops.pagedopt`` find it (see :func:`find_registered`).

    Raises:
        RuleError: its syntax is not that of a rule; the message names the line.  What its values do is refused at the
            first use that needs them (see :attr:`program`).
        ValueError: ``moments`` names what is no state or hyperparameter of the rule.
        TypeError: one of ``moments`` is no :class:`~pagedopt.Moment`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        moments: Mapping[str, Moment] = MappingProxyType({}),
        signature: Signature | None = None,
        parts: tuple[Rule, ...] = (),
    ) -> None:
        self._source = None if signature else source_of(function)
        self._said = signature or signature_of(function, self._source)  # type: ignore[arg-type]
        vars(self).update(vars(self._said))
        self.function, self.moments, self.__doc__ = function, dict(moments), function.__doc__
        self.functor, self.prologue = f"rule_{self.name}", f"prologue_{self.name}"
        self.parts, self._in_place = parts, self
        self._traced: printers.Program | None = None
        self.registered = _register(self, function, bool(parts))
        for name, moment in self.moments.items():
            if not isinstance(moment, Moment):
                raise TypeError(f"rule {self.name!r}: moments[{name!r}] is {moment!r}; give a pagedopt.Moment")
            states, what = ", ".join(self.inputs[2:]) or "none", f"the decay of {name!r} is {moment.decay!r}"
            if name not in self.inputs[2:]:
                raise ValueError(
                    f"rule {self.name!r}: moments names {name!r}, which is no state of it; there is {states}"
                )
            if moment.decay is not None and moment.decay not in self.scalars:
                there = ", ".join(self.scalars)
                raise ValueError(f"rule {self.name!r}: {what}, which is no hyperparameter of it; there is {there}")

    @property
    def program(self) -> printers.Program:
        """Its graph, traced at the first use.

        Raises:
            RuleError: it does what no kernel can; the message shows the line, and says what to write instead.
        """
        base = self._in_place
        if base._traced is None:
            with _tracing:
                base._traced = base._traced or printers.Program(base, *Trace(base).run(base.function, base._source))
        return base._traced

    @cached_property
    def carried(self) -> dict[str, int]:
        """The hyperparameters that it returns: name → index of the new value in :meth:`uniforms`."""
        return self.program.carried

    @property
    def reads(self) -> tuple[int, ...]:
        """Indices of the lists it reads."""
        return tuple(self.program.reads)

    @property
    def between(self) -> tuple[int, ...]:
        """Indices of the lists whose values are rounded between two rules that it is made of."""
        return tuple(sorted({int(node.args[0]) for node in self.program.whole if node.op == "stored"}))

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of the inputs that it assigns and does not return."""
        return tuple(name for i, name in enumerate(self.inputs) if i not in self.changes and name in self.assigned)

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
        name = (__package__, "compose") if self.parts else (self.function.__module__, self.function.__qualname__)
        return _find, (*name, self._in_place is not self, *self.parts)

    def __call__(self, *elements: Any, **scalars: Any) -> Any:
        """Call the function: on numbers or tensors as Python does, or in another rule on its values."""
        node = next((x for x in (*elements, *scalars.values()) if isinstance(x, Node)), None)
        if node is not None and self._source is not None:
            return node.trace.call(self.function, *elements, **scalars)
        return self.function(*elements, **scalars)

    def uniforms(self, scalars: Mapping[str, float]) -> list[float]:
        """Return the numbers that a kernel receives: every expression of hyperparameters alone, computed in double.

        Raises:
            TypeError: a hyperparameter is missing, unknown or no number.
            RuntimeError: an expression is the root of a negative number.
            ArithmeticError, ValueError: as Python for an expression, e.g. a division by zero; the message names it.
            RuleError: see :attr:`program`.
        """
        host = self._host
        try:
            if str in map(type, scalars.values()):  # else 2 * "1" is "11", and float("11") is a number
                raise TypeError("a text is no number")
            return [*map(float, host(**scalars))]
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
            try:
                with strict():
                    for i, column in enumerate(self.program.on_columns(**scalars)):
                        if isinstance(column, np.ndarray) and column.dtype.kind != "f":
                            column = column.astype(np.float64, casting="safe")  # raises for complex numbers
                        out[:, i] = column
                return out
            except (ArithmeticError, TypeError, ValueError):
                pass  # a set is at fault, or only NumPy raises: computing set by set below decides
        for i in range(sets):
            out[i] = self.uniforms({n: float(v[i]) if isinstance(v, np.ndarray) else v for n, v in scalars.items()})
        return out

    @cached_property
    def _host(self) -> printers.Host:
        return self.program.on_numbers

    def _explain(self, values: Mapping[str, float], error: Exception) -> None:
        """Raise what :meth:`uniforms` documents: an error that names the hyperparameter or expression at fault."""
        missing = [s for s in self.scalars if s not in values and s not in self.defaults]
        unknown = [s for s in values if s not in self.scalars]
        if missing or unknown:
            tensors = [s for s in unknown if s in self.inputs]
            said = f"rule {self.name!r} takes the scalars {list(self.scalars)}; missing {missing}, unknown {unknown}"
            raise TypeError(said + (f": {self.before_star(tensors)}" if tensors else "")) from error
        for name, value in values.items():
            if not _is_number(value):
                raise TypeError(f"rule {self.name!r}: the scalar {name!r} is {value!r}; give a number") from error
        text, value = self.program.first_failure(values)
        given = ", ".join(f"{name}={v!r}" for name, v in values.items())
        if isinstance(value, complex):
            raise RuntimeError(f"rule {self.name!r}: {text} has the root of a negative number; {given}") from error
        if isinstance(value, ArithmeticError | ValueError):
            raise type(value)(f"rule {self.name!r}: {value} in {text!r}; {given}") from error

    def before_star(self, names: Sequence[str]) -> str:
        """Return the part of an error message that says why ``names`` are tensors and not hyperparameters."""
        said = ", ".join(map(repr, names))
        return f"in rule {self.name!r} {said} is before the '*' (or there is none), so it is a tensor"

    def reference(self, *tensors: torch.Tensor, **scalars: float) -> tuple[torch.Tensor, ...]:
        """Compute the rule on whole tensors, in double: a new value, of their dtype, for each list in ``writes``."""
        given = [t.detach().cpu().double().reshape(-1).numpy() for t in tensors]
        with np.errstate(all="ignore"):
            values = self.program.on_elements(*given, **scalars)
        whole = [torch.from_numpy(np.broadcast_to(value, given[0].shape).copy()) for value in values]
        return tuple(value.view(tensors[i].shape).to(tensors[i]) for value, i in zip(whole, self.changes, strict=True))

    def cuda_source(self) -> str:
        """Return the generated CUDA C++ functor."""
        return printers.cuda_functor(self, self.program)

    def prologue_source(self) -> str:
        """Return the generated CUDA C++ of :meth:`uniforms` (see :func:`language.printers.cuda_prologue`)."""
        return printers.cuda_prologue(self, self.program)

    def numba_lines(
        self, load: Sequence[str], store: Sequence[str], stored: Sequence[printers.Stored] = ()
    ) -> list[str]:
        """Return the generated statements of the CPU kernel's loop (see :func:`language.printers.numba_lines`)."""
        return printers.numba_lines(self, self.program, load, store, stored)

    def numba_source(self, dtypes: Sequence[torch.dtype] | None = None) -> str:
        """Return the generated Python source of the CPU kernel for ``dtypes`` (default: all float32)."""
        from ..formats.floating import of_dtype
        from ..kernels.cpu_text import source

        return source(self, tuple(map(of_dtype, dtypes or [torch.float32] * len(self.inputs))))

    @cached_property
    def out_of_place(self) -> Rule:
        """The rule with one more list per result, after its inputs; results go there, and the inputs stay unchanged."""
        inputs = (*self.inputs, *(f"out_{self.inputs[i]}" for i in self.changes))
        writes = tuple(range(len(self.inputs), len(inputs)))
        signature = dataclasses.replace(self._said, name=f"{self.name}_out", inputs=inputs, writes=writes)
        made = Rule(self.function, self.moments, signature, self.parts)
        made._in_place = self
        return made


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
    keyword-only ones hyperparameters, of which some may have numbers as defaults.  It ends with the one ``return``: of
    the names of those that change, in any order; or, if one of several values is no such name, of one value for each
    output by position (the positional parameters in order, without a second one called ``grad``); or of one expression,
    which overwrites the first.

    A rule is traced: Python runs it once, at its first use, with symbols in the place of numbers, and kernels compute
    what came of them.  So Python itself may do anything with what is known then: constants of a module, loops, tuples,
    closures, other functions and rules.  A global, or a function, that changes later does not change the rule.  On
    elements and hyperparameters there are arithmetic, comparisons, ``and``, ``or``, ``not`` and ``a if test else b``
    (which take symbols as tests; ``if`` and ``while`` do not), ``abs``, ``min``, ``max``, and of :mod:`pagedopt.rules`
    ``exp``, ``log``, ``tanh``, ``sqrt`` (those of ``math`` are the same), ``sign`` and ``fma``; of elements the powers
    2 and 3.
    What depends on hyperparameters alone is computed once per step on the host, in double, and only in the branches
    that tests of hyperparameters take; everything else in float32, or in float64 if a list is float64.  So is a
    comparison with 0, such as ``weight_decay != 0``: the kernel has the number anyway.

    Args:
        moments: for each state that may be stored in 8 bits or in float16, whether it may be negative, by what it
            decays, and whether it holds squares.

    Raises:
        RuleError: its syntax is another, or its source cannot be found or is not what Python runs.  What its values
            do is refused at the first use.  The message begins with file and line, and says what to write instead.

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


def find_registered(name: str) -> Rule:
    """Return the rule that has this name in ``registered``; a rule of a module is imported if need be.

    Raises:
        ValueError: there is none in this process.
    """
    found = _rules.get(name)
    module, colon, function = name.partition(":")
    if found is None and colon:
        try:
            found = _find(module, function, False)
        except (ImportError, AttributeError, TypeError):
            found = None
    if not isinstance(found, Rule):
        raise ValueError(
            f"no rule {name!r} is alive in this process; keep the rule that was compiled alive, or define it with "
            "pagedopt.rule in a module that can be imported"
        )
    return found


def _find(module: str, name: str, out_of_place: bool, *parts: Rule) -> Rule:
    """Find a rule by the name of its function, or of what makes it of others: pickles of rules hold no code."""
    found = operator.attrgetter(name)(importlib.import_module(module))
    found = found(*parts) if parts else found
    base = found if isinstance(found, Rule) else Rule(found)
    return base.out_of_place if out_of_place else base


#: Every rule that is alive, by name.
_rules: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_count = itertools.count(1)
#: Part of the names that only this process knows, so that no other process finds another rule by one of them.
_here = secrets.token_hex(4)


def _register(rule: Any, function: Callable[..., Any], composed: bool) -> str:
    """Return a name for ``rule``, by which :func:`find_registered` finds it while it is alive.

    A rule of a module has the name of its function, by which any process finds it that can import it.  A rule that was
    made in a function or of others, and a second rule of one function, have a name for this process alone.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "rule")
    full = f"{module}:{name}"
    if composed or module is None or "<locals>" in name or full in _rules:
        full = f"{name}@{_here}.{next(_count)}"
    _rules[full] = rule
    return full


__all__ = ["Rule", "check_rule", "exp", "find_registered", "fma", "log", "rule", "sign", "sqrt", "tanh"]
