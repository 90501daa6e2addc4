"""Traces a rule: Python runs it with nodes in the place of numbers, and every operation on one makes another.

What would ask for a truth value (``a if t else b``, ``and``, ``or``, ``not``, comparisons) and calls are rewritten
before into calls of :class:`Trace`; an assignment also names its value.  All else is Python's own.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import pickle
import random
from collections.abc import Callable, Hashable, Iterable
from numbers import Integral, Real
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, TracebackType
from typing import Any, NoReturn

import numpy as np
import torch

from ...common.names import kind_of
from .operations import ARITY, FUNCTIONS, NAMES, OPERATIONS
from .rewrite import rewritten
from .syntax import RuleError, Signature, Source, check, codes, refuse, source_of

#: The most operations of a rule.
MAX_NODES = 10_000
#: Operators of Python, by the method of a node that is called.
BINARY = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "**": "pow", "%": "mod", "//": "floordiv"}
COMPARED = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}


class Refusal(Exception):
    """What a rule must not do, without the line where it does."""


class Raw(str):
    """An operand that is printed as it is."""


class Node:
    """One operation, or an input.  Equal operations of one rule are one node.

    Attributes:
        op: a key of :data:`OPERATIONS`; of leaves "input" or "scalar".
        args: its operands: nodes, or numbers.
        name: the author's, if any.
        paths: the branches in which the author computes it, each as pairs (index of a test, which way); () is outside.
        varies: whether it depends on elements; otherwise on hyperparameters alone.
        truth: whether it is a truth value.
        whole: whether Python has an int for it, whatever the hyperparameters.
        risky: whether Python may raise for it or what it is made of.
    """

    __slots__ = ("args", "index", "name", "op", "paths", "risky", "trace", "truth", "varies", "whole")
    __array_ufunc__ = None  # NumPy's numbers leave their operators to ours
    __hash__ = object.__hash__

    def __init__(self, trace: Trace, op: str, *args: Any, name: str = "") -> None:
        self.trace, self.op, self.args, self.name, self.index = trace, op, args, name, len(trace.nodes)
        nodes, row = [a for a in args if isinstance(a, Node)], OPERATIONS.get(op)
        self.paths: set[tuple[tuple[int, bool], ...]] = set()
        self.varies: bool = op in ("input", "stored") or any(a.varies for a in nodes)
        self.truth = row is not None and row.truth
        self.risky: bool = row is not None and (row.risky or any(a.risky for a in nodes))
        self.whole = row is not None and row.whole is not None and all(_is_whole(args[i]) for i in row.whole)
        trace.nodes.append(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refusal(_of_tensors(name))

    def __pos__(self) -> Node:
        return self

    def __neg__(self) -> Node:
        return self.trace.node("neg", self)

    def __abs__(self) -> Node:
        return self.trace.node("abs", self)


def _binary(op: str, backwards: bool) -> Callable[[Node, Any], Node]:
    return lambda self, other: self.trace.binary(op, *((other, self) if backwards else (self, other)))


def _refusing(why: str) -> Callable[..., NoReturn]:
    def method(*_: Any) -> NoReturn:
        raise Refusal(why)

    return method


for _op, _name in (BINARY | COMPARED).items():
    setattr(Node, f"__{_name}__", _binary(_op, False))
    if _op in BINARY:
        setattr(Node, f"__r{_name}__", _binary(_op, True))
for _why, _names in {
    "it asks whether a value is true, which is known only in a kernel; a choice is an expression: write "
    "'name = a if test else b' (a loop runs over what is known now)": "bool",
    "elements and hyperparameters have no bits; use + - * /, and 'and', 'or', 'not' in conditions":
        "and or xor lshift rshift matmul rand ror rxor rlshift rrshift rmatmul invert",
    "a value has no number while a rule is traced; leave float(), int() and the like out: hyperparameters are floats":
        "float int complex round trunc floor ceil",
    "a rule sees one element of each tensor, and hyperparameters are numbers: there is nothing inside":
        "getitem setitem iter len index contains call",
    "a value has no text while a rule is traced; leave it out": "format",
}.items():  # fmt: skip
    for _name in _names.split():
        setattr(Node, f"__{_name}__", _refusing(_why))


def _is_whole(value: Any) -> bool:
    return value.whole if isinstance(value, Node) else isinstance(value, int)


_ON_OBJECTS: dict[str, Callable[[Any, Any], Any]] = {
    "is": operator.is_, "is not": operator.is_not, "in": lambda a, b: a in b, "not in": lambda a, b: a not in b,
}  # fmt: skip
#: Builtins that may be called with a node; what they do with it, they do by its operators.
_ALLOWED = (sum, zip, list, tuple, dict, set, enumerate, reversed, map, filter, iter, range, pow, float, int, bool,
            complex, round)  # fmt: skip
#: Modules whose functions take numbers, not nodes; names that they have for functions that a rule may call.
_NUMERIC = ("math", "cmath", "_operator", "numpy", "torch")
_OTHER_NAMES = {"absolute": "abs", "fabs": "abs", "fmax": "max", "fmin": "min", "maximum": "max", "minimum": "min"}
#: Methods and functions that make one number of a whole tensor.
_REDUCTIONS = ("norm", "vector_norm", "sum", "mean", "prod", "std", "var", "min", "max", "amin", "amax", "dot", "all",
               "any")  # fmt: skip


class Trace:
    """One run of a rule with nodes.

    Attributes:
        nodes: in the order in which Python made them.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature, self.nodes, self._count = signature, list[Node](), 0
        self._known: dict[Any, list[Node]] = {}
        self._path: tuple[tuple[int, bool], ...] = ()
        self._rewritten: dict[FunctionType, FunctionType] = {}
        self._own: set[CodeType] = set()
        self._active: list[FunctionType] = []

    def run(self, function: Any, source: Source | None) -> tuple[list[Node], dict[str, Any]]:
        """Return all nodes, and the values of what the rule returns, by name, or raise RuleError at the line at fault.

        Args:
            source: of ``function``; None: it is ours, and is called as it is.
        """
        inputs = [Node(self, "input", name=name) for name in self.signature.inputs]
        scalars = {name: Node(self, "scalar", name=name) for name in self.signature.scalars}
        try:
            return self.nodes, self._results(self._traced(function, source)(*inputs, **scalars))
        except RuleError:
            raise
        except Exception as error:
            self._refuse(error, source)

    def _results(self, value: Any) -> dict[str, Any]:
        names = self.signature.returned
        values = value if isinstance(value, tuple) and len(value) == len(names) else (value,)
        for each in values:
            if isinstance(each, tuple | list):
                one = " for one parameter" if names else "; assign them to parameters, and return these by name"
                raise Refusal(f"returns {len(each)} values{one}")
        found = dict(zip(names or self.signature.inputs[:1], map(self._operand, values), strict=True))
        if several := [n for n in self.signature.counted if isinstance(found[n], Node) and found[n].varies]:
            raise Refusal(f"{several[0]!r} is one number for all elements; it must not depend on a tensor's")
        return found

    def _refuse(self, error: Exception, source: Source | None) -> NoReturn:
        """Raise a RuleError at the innermost line of a traced function; without one: at the end of ``source``."""
        found, trace = list[TracebackType](), error.__traceback__
        while trace is not None:
            found += [trace] * (trace.tb_frame.f_code in self._own)
            trace = trace.tb_next
        first_line = str(error).strip().partition("\n")[0]  # of torch's, many may follow
        why = str(error) if isinstance(error, Refusal) else f"{type(error).__name__}: {first_line}"
        if found:
            outer, inner = found[0], found[-1]
            file, line = inner.tb_frame.f_code.co_filename, inner.tb_lineno
            if (outer.tb_frame.f_code.co_filename, outer.tb_lineno) != (file, line):
                why += f" (called by line {outer.tb_lineno} of the rule {self.signature.name!r})"
            first, last, begin, end = list(inner.tb_frame.f_code.co_positions())[inner.tb_lasti // 2]
            refuse(file, line, why, begin or 0, end if first == last else None)
        if source is not None:
            source.refuse(source.tree.body[-1], why)
        raise RuleError(f"rule {self.signature.name!r}: {why}") from None

    # ---- nodes ----

    def node(self, op: str, *args: Any) -> Node:
        """Return the node of an operation."""
        self._count += 1
        if self._count > MAX_NODES:
            raise Refusal(f"more than {MAX_NODES} operations; a rule is the update of one element")
        args = tuple(map(self._operand, args))
        key = (op, *((a.index,) if isinstance(a, Node) else (type(a), repr(a)) for a in args))
        for node in self._known.get(key, ()):
            if node.varies or not node.risky:
                node.paths.add(self._path)
                return node
            # Python may raise: what another branch computes is a node of its own, decided by tests that come before it.
            if any(self._path[: len(path)] == path for path in node.paths):
                return node
        node = Node(self, op, *args)
        node.paths.add(self._path)
        self._known.setdefault(key, []).append(node)
        return node

    def binary(self, op: str, left: Any, right: Any) -> Node:
        """Return the node of an operator."""
        if any(isinstance(a, Node) and a.varies for a in (left, right)) and op in ("**", "%", "//"):
            if op != "**" or isinstance(right, Node) or right not in (2, 3):
                roots = ", or 'from pagedopt.rules import sqrt, exp, log'" if op == "**" else ""
                raise Refusal(f"{op!r} of elements; use + - * / or the powers 2 and 3{roots}")
            square = self.node("*", left, left)
            return square if right == 2 else self.node("*", square, left)
        return self.node(op, left, right)

    def _operand(self, value: Any) -> Any:
        """Return a node of this trace, or a Python number, which ``value`` is; refuse other things."""
        if isinstance(value, Node) and value.trace is not self:
            raise Refusal("a value of another rule, or of an earlier trace; give it as an argument")
        if isinstance(value, Node | Raw):
            return value
        if not isinstance(value, Real):
            said = repr(value) if value is None or isinstance(value, str | complex) else kind_of(value)
            advice = "; a branch is one number: choose each by itself" if isinstance(value, tuple) else ""
            advice += "; a tensor is an argument of the rule, and of one number take .item()" * (said == "a Tensor")
            raise Refusal(f"{said} where a number is needed{advice}")
        try:
            float(value)
        except OverflowError:
            raise Refusal("an int that is too large for a float") from None
        return int(value) if isinstance(value, Integral) else float(value)

    # ---- what rewritten code calls ----

    def _traced(self, function: FunctionType, source: Source | None) -> Callable[..., Any]:
        """Return a function that runs ``function`` rewritten; without ``source``: as it is."""
        if source is not None and function not in self._rewritten:
            check(source)
            self._rewritten[function] = rewritten(function, source, self)
            self._own |= {*codes(self._rewritten[function].__code__)}

        def run(*args: Any, **kwargs: Any) -> Any:
            if function in self._active:
                raise Refusal(f"{function.__name__!r} calls itself, directly or through others; write each turn out")
            self._active.append(function)
            try:
                return self._rewritten.get(function, function)(*args, **kwargs)
            finally:
                self._active.pop()

        return run

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function: one of :data:`FUNCTIONS` makes a node, other Python functions are traced, too."""
        if draws(function, (*args, *kwargs.values())):
            raise Refusal(_drawn(function))
        if isinstance(function, MethodType):
            function, args = function.__func__, (function.__self__, *args)
        if getattr(function, "__code__", None) in self._own:
            return self._traced(function, None)(*args, **kwargs)
        given = (*args, *kwargs.values())
        if not any(map(_has_node, given)):
            return _as_it_is(function, args, kwargs)
        name = next((name for known, name in NAMES.items() if known is function), "")
        if name and not kwargs and (len(args) == ARITY[name] or len(args) > ARITY[name] == 2):
            first = self.node(name, *args[: ARITY[name]])
            return functools.reduce(lambda a, b: self.node(name, a, b), args[ARITY[name] :], first)
        if isinstance(function, FunctionType) and not name and _home(function) not in _NUMERIC:
            try:
                source = source_of(function)
            except RuleError as error:
                raise Refusal(f"{function.__name__!r} is no function that can be traced: {error}") from None
            return self._traced(function, source)(*args, **kwargs)
        if any(isinstance(a, Node) for a in given) and (name or not _is_native(function)):
            raise Refusal(_instead(_called(function), name))
        return _as_it_is(function, args, kwargs)

    def choice(self, test: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """``yes if test else no``"""
        if not isinstance(test, Node):
            return yes() if test else no()
        return self.node("choice", test, self._branch(test, True, yes), self._branch(test, False, no))

    def _branch(self, test: Node, taken: bool, value: Callable[[], Any]) -> Any:
        before, self._path = self._path, (*self._path, (test.index, taken))
        try:
            return self._operand(value())
        except (ArithmeticError, ValueError) as error:  # of numbers alone: the host raises if the branch is taken
            if any(self.nodes[i].varies for i, _ in self._path):
                raise
            name = "ValueError" if isinstance(error, ValueError) else type(error).__name__
            return self.node("raise", Raw(name), Raw(repr(str(error))))
        finally:
            self._path = before

    def joined(self, op: str, condition: bool, first: Any, *rest: Callable[[], Any]) -> Any:
        """``first and …`` or ``first or …``; ``condition``: only its truth is asked for."""
        if not rest:
            return first
        if not isinstance(first, Node):
            return first if bool(first) == (op == "or") else self.joined(op, condition, rest[0](), *rest[1:])
        if not condition:  # Python returns one of the operands, a kernel a truth value
            raise Refusal(f"the value of {op!r}, which is allowed in conditions only; write 'a if test else b'")
        second = self._branch(first, op == "and", lambda: self.joined(op, True, rest[0](), *rest[1:]))
        return self.node(op, first, second)

    def denied(self, value: Any) -> Any:
        """``not value``"""
        return self.node("not", value) if isinstance(value, Node) else not value

    def compared(self, left: Any, op: str, value: Callable[[], Any], *more: Any) -> Any:
        """``left < value``, ``left < value <= …``, ``left is value``, …"""
        right = value()
        if op in _ON_OBJECTS and (_has_node(left) or _has_node(right)):
            raise Refusal(f"{op!r} of a value, which is a number: compare it with ==, or write 'a if test else b'")
        first = (_ON_OBJECTS[op] if op in _ON_OBJECTS else getattr(operator, COMPARED[op]))(left, right)
        return self.joined("and", True, first, lambda: self.compared(right, *more)) if more else first

    def named(self, name: str, value: Any) -> None:
        """Remember the author's name of a value."""
        if isinstance(value, Node):
            value.name = value.name or name


def _has_node(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value
    return isinstance(value, Node) or (isinstance(value, tuple | list | set | dict) and any(map(_has_node, inner)))


def _is_native(function: Any) -> bool:
    """Whether Python may call a function with a node: it can only compute with it, or pass it on."""
    if isinstance(function, BuiltinFunctionType) and isinstance(function.__self__, list | dict | set):
        return True
    home = _home(function)
    return function in _ALLOWED if isinstance(function, Hashable) and home == "builtins" else home not in _NUMERIC


def _home(function: Any) -> str:
    return (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]


def _called(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _as_it_is(function: Any, args: Any, kwargs: Any) -> Any:
    """Call what is not traced; refuse it if it draws from a generator that all code shares, or gives two numbers."""
    before = states()
    result = function(*args, **kwargs)
    if states() != before:
        raise Refusal(_drawn(function))
    if isinstance(result, Real) and (again := function(*args, **kwargs)) != result and again == again:
        raise Refusal(_drawn(function))
    return result


def _drawn(function: Any) -> str:
    return (
        f"call of {_called(function)!r}, which gives another number each time; a rule runs once, to be traced, and "
        "every step would have this number: give it as a hyperparameter, or numbers for all elements as a tensor"
    )


def _of_tensors(name: str) -> str:
    """Say that an element has no ``name``, and what to write instead."""
    one = f"a rule sees one element of each tensor, and hyperparameters are numbers: these have no {name!r}"
    if name in _REDUCTIONS:
        return f"{one}; compute it before the step (norms by pagedopt.foreach_norm), and give it as a hyperparameter"
    return f"{one}; call {name}(…)" if name in FUNCTIONS else one


def _instead(called: str, known: str) -> str:
    """Say what to write for a call that is refused; ``known``: its name among :data:`FUNCTIONS`."""
    name = _OTHER_NAMES.get(called, called.removeprefix("linalg_"))
    if name in FUNCTIONS and not known:
        builtin = FUNCTIONS[name].__module__ == "builtins"
        how = f"Python's own {name}" if builtin else f"'from pagedopt.rules import {name}'"
        return f"call of another {called!r}; write {how} and call {name}(…)"
    if name in _REDUCTIONS and not known:
        return _of_tensors(name)
    there = ", ".join(f"{name}/{arity}" for name, arity in ARITY.items())
    return f"call of {called!r}; a rule may call plain functions, written with def, and (name/arguments) {there}"


# --- calls that give another number each time: of a rule, which is traced once, every step would have the first -------

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def draws(function: Any, given: Iterable[Any]) -> bool:
    """Return whether a call is one of a generator of random numbers, is given one, or asks for the time."""
    clock = getattr(function, "__module__", "") in ("time", "secrets")
    return clock or any(isinstance(x, _GENERATORS) for x in (getattr(function, "__self__", None), *given))


def states() -> bytes:
    """Return the states of Python's, NumPy's and torch's own generators (of torch that of the CPU)."""
    state = torch.get_rng_state()  # read by address: a mode of torch's may be active, which would make a fake of a copy
    own = ctypes.string_at(state.data_ptr(), state.nbytes)
    return own + pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
