"""Prints a traced rule, split into what the host computes once and what a kernel computes per element.

Whatever depends on hyperparameters alone is *uniform*: it is hoisted out of the kernel and computed once per step on
the host, in double, so ``(1 - beta2) * grad`` rounds to float32 once, as in torch's default.  A comparison of
hyperparameters with 0 is the kernel's: it has the number anyway, and rounded to float32 only what is below 1e-45
becomes 0.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from .operations import EXACT, FUNCTIONS, OPERATIONS, PYTHON, REFERENCE
from .syntax import Signature
from .trace import COMPARED, Node, Raw

#: Keywords and macros of C++ that Python accepts as names, and words that the kernels' text needs for itself.
_WORDS = """alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t compl const
    const_cast constexpr decltype default delete do double dynamic_cast enum explicit export extern false float friend
    goto inline int long mutable namespace new noexcept not_eq nullptr operator or_eq private protected public register
    reinterpret_cast short signed sizeof static static_assert static_cast struct switch template this thread_local
    throw true typedef typeid typename union unsigned using virtual void volatile wchar_t xor xor_eq INFINITY NAN NULL
    in u out S T np python stored float_of bits_of"""
_RESERVED = {*_WORDS.split(), *dir(builtins), *FUNCTIONS, *(f"element_{name}" for name in FUNCTIONS)}
#: Texts that nest deeper become statements.
DEEP = 24
#: How numbers that are no literals are written, in Python and in CUDA: NVRTC knows no INFINITY.
_PYTHONS = {"inf": "1e309", "-inf": "-1e309", "nan": "1e309 - 1e309"}
_CUDAS = {"inf": "1.0 / 0.0", "-inf": "-1.0 / 0.0", "nan": "0.0 / 0.0"}
Stored = Callable[[str], str]
Host = Callable[..., list[Any]]


class Program:
    """The parts of a traced rule.

    Attributes:
        nodes: of the trace.
        leaves: inputs and hyperparameters, by name.
        results: the value of each changed input: a node or a number.
        whole: all nodes that they are made of, in order; ``kernel`` are those that kernels compute per element.
        uniforms: the values that kernels receive, in order.
        host: the nodes that the host computes for them, in order.
        carried: hyperparameters that the rule returns: name → index of the new value in ``uniforms``.
        reads: indices of the inputs whose values it uses.
        on_numbers: hyperparameters as keywords → the value of every uniform (a number, a bool, or complex).
        on_columns: the same for arrays, a value per set; within :func:`strict` with the same bits.
        on_elements: arrays and, as keywords, hyperparameters → the value of every result.
    """

    def __init__(self, signature: Signature, nodes: list[Node], values: Mapping[str, Any]) -> None:
        self.nodes, self.leaves = nodes, {node.name: node for node in nodes if node.op in ("input", "scalar")}
        self.results = [value for name, value in values.items() if name not in signature.counted]
        self.whole = self._live(self.results)
        self.kernel = [node for node in self.whole if node.varies]
        received: dict[Any, Any] = {}
        for value in (*(a for node in self.kernel for a in node.args), *self.results):
            if isinstance(value, Node) and not value.varies:
                value = value.args[0] if _compares_with_zero(value) else value
                received[value] = value
        for name in signature.counted:
            received.setdefault(values[name] if isinstance(values[name], Node) else name, values[name])
        self.uniforms, at = list(received.values()), {key: i for i, key in enumerate(received)}
        self.carried = {n: at[v if isinstance(v := values[n], Node) else n] for n in signature.counted}
        self.host, used = self._live(self.uniforms), {node.name for node in self.kernel if node.op == "input"}
        self.reads = [i for i, name in enumerate(signature.inputs) if name in used]
        self.on_numbers = self._function(signature, "python", PYTHON)
        self.on_columns = self._function(signature, "array", EXACT)
        self.on_elements = self._function(signature, "array", REFERENCE, tensors=True)

    def _live(self, wanted: Iterable[Any]) -> list[Node]:
        """Return the nodes that ``wanted`` are made of, in the order in which they were made."""
        live = {value for value in wanted if isinstance(value, Node)}
        for node in reversed(self.nodes):
            if node in live:
                live |= {a for a in (*node.args, *self.tests(node)) if isinstance(a, Node)}
        return [node for node in self.nodes if node in live]

    def tests(self, node: Node) -> list[Node]:
        """Return the tests that decide whether the author computes a risky node of hyperparameters."""
        if node.varies or not node.risky or () in node.paths:
            return []
        return [test for i in sorted({i for path in node.paths for i, _ in path}) if not (test := self.nodes[i]).varies]

    def host_writer(self, column: str, tensors: bool = False) -> tuple[Writer, list[str]]:
        """Return the writer of the host's part (with ``tensors``: of all) as Python, and the texts of its results."""
        prefix = "f_"
        while any(node.name.startswith(prefix) for node in self.nodes):
            prefix += "_"
        writer = Writer(self, column, self.leaves, prefix)
        writer.given = {node: node.name for node in self.leaves.values() if tensors or node.op == "scalar"}
        results = writer.write(*((self.whole, self.results) if tensors else (self.host, self.uniforms)))
        return writer, results

    def _function(self, signature: Signature, column: str, functions: Mapping[str, Any], tensors: bool = False) -> Host:
        writer, results = self.host_writer(column, tensors)
        given = [text for node, text in writer.given.items() if node.op == "input"]
        parameters = ", ".join([*given, *(["*", *signature.scalars] if signature.scalars else [])])
        lines = [f"    {name} = {text}\n" for name, text, _ in writer.statements]
        text = f"def host({parameters}):\n{''.join(lines)}    return [{', '.join(results)}]"
        namespace: dict[str, Any] = {f"{writer.prefix}{name}": function for name, function in functions.items()}
        exec(compile(text, f"<{column} part of rule {signature.name}>", "exec"), namespace)
        made: Host = namespace["host"]
        made.__kwdefaults__ = self.defaults = dict(signature.defaults)
        return made

    def first_failure(self, scalars: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the first expression that raises or is complex, and the exception or number; else ("", None)."""
        writer, results = self.host_writer("python")
        values = {f"{writer.prefix}{name}": f for name, f in PYTHON.items()} | self.defaults | dict(scalars)
        for name, text, _ in (*writer.statements, *(("", text, False) for text in results)):
            try:
                values[name] = eval(text, {}, values)
            except (ArithmeticError, TypeError, ValueError) as error:
                values[name] = error
            if isinstance(values[name], complex | Exception):
                return _readable(text, writer), values[name]
        return "", None


def _compares_with_zero(node: Node) -> bool:
    return node.op in COMPARED and not isinstance(node.args[1], Node) and node.args[1] == 0


class Writer:
    """Prints nodes as statements of one language.

    Args:
        column: of :data:`OPERATIONS`.
        taken: names that no statement may have.
        prefix: of names of functions.
        stored: for each list the text of a number that it has stored and loaded again, by its text (Numba).

    Attributes:
        given: texts of leaves and uniforms; they are numbers.
        texts: of what has been printed: names of statements, and expressions.
        statements: (name, text, whether it is a truth value).
        sources: the text of each node's own operation.
    """

    def __init__(
        self, program: Program, column: str, taken: Iterable[str] = (), prefix: str = "", stored: Sequence[Stored] = ()
    ) -> None:
        self.program, self.column, self.prefix, self.stored = program, column, prefix, stored
        self.given: dict[Node, str] = {}
        self.texts: dict[Node, str] = {}
        self.sources: dict[Node, str] = {}
        self.statements: list[tuple[str, str, bool]] = []
        self._taken, self._depths, self._named = set(taken), Counter[Node](), set[Node]()
        self._typed = column in ("cuda", "prologue", "numba")

    def name(self, name: str) -> str:
        """Return a new name; what must not be one gets ``_``, and C++ (by NVRTC) takes ASCII alone."""
        name = name if name.isascii() else f"_{name.encode().hex()}"
        name += "_" if name in _RESERVED or name.startswith("_") or re.fullmatch(r"u\d+", name) else ""
        number, found = 1, name
        while found in self._taken:
            number += 1
            found = f"{name}_{number}"
        self._taken.add(found)
        return found

    def give(self, op: str) -> list[str]:
        """Give names to the inputs or hyperparameters, and return these."""
        self.given |= {node: self.name(name) for name, node in self.program.leaves.items() if node.op == op}
        return [text for node, text in self.given.items() if node.op == op]

    def write(self, nodes: list[Node], results: list[Any]) -> list[str]:
        """Print nodes, in order, and return the text of each result."""
        self.texts |= self.given
        operands = (a for node in nodes for a in (*node.args, *self.program.tests(node) * 2))
        uses = Counter(value for value in (*operands, *results) if isinstance(value, Node))
        for node in nodes:
            if node not in self.texts:
                text = self._text(node)
                if uses[node] > 1 or self._depths[node] > DEEP or (node.name and () in node.paths):
                    name = self.name(node.name or "t")
                    self.statements.append((name, self._guarded(node, text), node.truth))
                    self.texts[node], self._depths[node] = name, 0
                    self._named.add(node)
        return [self._guarded(value, self.number(value)) for value in results]

    def _guarded(self, value: Any, text: str) -> str:
        """Return ``text``, computed only in the branches in which the author computes it; else 0."""
        if not isinstance(value, Node) or value in self._named or not self.program.tests(value):
            return text
        cases = []
        for path in value.paths:
            tests = [(self.condition(t), taken) for i, taken in path if not (t := self.program.nodes[i]).varies]
            each = [test if taken else self._row("not", test) for test, taken in tests]
            if not each:
                return text
            cases.append(reduce(lambda a, b: self._row("and", b, a), reversed(each)))
        return self._row("choice", reduce(lambda a, b: self._row("or", b, a), reversed(cases)), text, self.number(0.0))

    def _row(self, op: str, *args: str) -> str:
        again = self.stored[int(args[0])](args[1]) if op == "stored" and self.stored else ""
        return OPERATIONS[op].text(self.column).format(*args, f=self.prefix, stored=again)

    def _text(self, node: Node) -> str:
        conditions = OPERATIONS[node.op].conditions
        args = (self.condition(a) if i in conditions else self.number(a) for i, a in enumerate(node.args))
        text = self._row(node.op, *args)
        if self.column == "prologue" and node.whole and node.op in ("*", "%", "//", "neg"):
            text = f"python::whole({text})"  # an int has no negative zero
        self._depths[node] = 1 + max((self._depths[a] for a in node.args if isinstance(a, Node)), default=0)
        self.texts[node] = self.sources[node] = text
        return text

    def number(self, value: Any) -> str:
        """Return the text of a value as a number."""
        if isinstance(value, Node):
            text = self.texts.get(value) or self._text(value)
            if self.column == "python" and value.op in ("and", "or"):  # which give one of their operands
                return f"(not not {text})"
            return f"S({text})" if self._typed and value.truth and value not in self.given else text
        if isinstance(value, Raw):
            return value
        text = repr(float(value) if self._typed else value)
        text = (_CUDAS if self.column in ("cuda", "prologue") else _PYTHONS).get(text, text)
        return f"S({text})" if self._typed else f"({text})" if re.search("^-| ", text) else text

    def condition(self, value: Any) -> str:
        """Return the text of a value as a condition."""
        if isinstance(value, Node) and value.truth and value not in self.given:
            return self.texts.get(value) or self._text(value)
        return f"({self.number(value)} != S(0))" if self._typed else self.number(value)


def _kernel(program: Program, column: str, stored: Sequence[Stored] = ()) -> tuple[Writer, list[str], list[str]]:
    """Return the writer of a kernel's part, the names of its inputs, and the texts of its results."""
    writer = Writer(program, column, stored=stored)
    inputs = writer.give("input")
    writer.given |= {value: f"u{i}" for i, value in enumerate(program.uniforms) if isinstance(value, Node)}
    return writer, inputs, writer.write(program.kernel, program.results)


def cuda_functor(signature: Signature, program: Program) -> str:
    """Return CUDA C++ text: a struct with ``apply(in, u, out)`` on elements of type S, of lists of types T."""
    writer, inputs, results = _kernel(program, "cuda")
    host, _ = program.host_writer("python")
    lines = [f"const S {name} = in[{i}];" for i, name in enumerate(inputs) if i in program.reads]
    for i, value in enumerate(program.uniforms):
        lines.append(f"const S u{i} = u[{i}];  // {_readable(host.sources.get(value) or host.number(value), host)}")
    reads, writes = (sum(1 << i for i in at) for at in (program.reads, signature.writes))
    outputs = [signature.writes.index(i) if i in signature.writes else -1 for i in range(len(signature.inputs))]
    head = f"    static constexpr unsigned reads = {reads:#x}, writes = {writes:#x};\n{_of('output_of', outputs)}"
    numbers = {"lists": len(outputs), "uniforms": len(program.uniforms), "outputs": len(results)}
    declared = "template <class S, class... T> static __device__ void apply(const S* in, const S* u, S* out)"
    lines += [*_declared(writer), *(f"out[{i}] = {text};" for i, text in enumerate(results))]
    return _struct(f"rule_{signature.name}", numbers, head, declared, lines)


def cuda_prologue(signature: Signature, program: Program) -> str:
    """Return CUDA C++ text: a struct whose ``compute(in, u)`` makes the uniforms of hyperparameters.

    ``in`` holds the hyperparameters in the order of the rule's ``scalars``, ``u`` takes the numbers of
    :meth:`Rule.uniforms`.  Both are doubles.  Arithmetic is that of Python's floats, with these differences:

    * Where Python raises, the result is infinity or NaN: a division by zero, ``log(0)``, an overflow; the root of a
      negative number is NaN.
    * An int that depends on a hyperparameter (the truth of a comparison is one) is a double, exact up to 2**53.
    * Where a value is an int in one case and a float in another, a zero may have another sign: ``-max(0, lr)`` is -0.0
      for a negative ``lr``, in Python 0.

    On a GPU ``**``, ``exp``, ``log`` and ``tanh`` may differ from Python's in the last bit.
    """
    writer = Writer(program, "prologue", prefix="python::")
    scalars = writer.give("scalar")
    results = writer.write(program.host, program.uniforms)
    lines = ["typedef double S;", *(f"const S {name} = in[{i}];" for i, name in enumerate(scalars))]
    lines += [*_declared(writer), *(f"u[{i}] = {text};" for i, text in enumerate(results))]
    step_at = signature.scalars.index("step") if "step" in signature.scalars else -1
    numbers = {"scalars": len(scalars), "uniforms": len(results), "step_at": step_at, "carried": len(program.carried)}
    head = _of("carried_scalar", map(signature.scalars.index, program.carried))
    head += _of("carried_uniform", program.carried.values())
    declared = "static __device__ void compute(const double* in, double* u)"
    return _struct(f"prologue_{signature.name}", numbers, head, declared, lines)


def _declared(writer: Writer) -> list[str]:
    return [f"const {'bool' if truth else 'S'} {name} = {text};" for name, text, truth in writer.statements]


def _of(name: str, values: Iterable[int]) -> str:
    """Return the text of a function of k that gives value k."""
    listed = ", ".join(map(str, values)) or "-1"  # C++ has no empty arrays
    body = f"        constexpr int at[] = {{{listed}}};\n        return at[k];\n"
    return f"    static __host__ __device__ constexpr int {name}(int k) {{\n{body}    }}\n"


def _struct(name: str, numbers: dict[str, int], head: str, declared: str, lines: list[str]) -> str:
    constants = ", ".join(f"{key} = {value}" for key, value in numbers.items())
    body = textwrap.indent("\n".join(lines), " " * 8)
    return f"struct {name} {{\n    static constexpr int {constants};\n{head}    {declared} {{\n{body}\n    }}\n}};\n"


def numba_lines(
    signature: Signature, program: Program, load: Sequence[str], store: Sequence[str], stored: Sequence[Stored]
) -> list[str]:
    """Return statements of Python for one element.

    Args:
        load: ``load[i]`` reads list i.
        store: ``store[i]`` stores the value put for its ``{}``.
        stored: ``stored[i]`` gives the text of a number that list i has stored and loaded again, by its text.
    """
    writer, inputs, results = _kernel(program, "numba", stored)
    lines = [f"{name} = {load[i]}" for i, name in enumerate(inputs) if i in program.reads]
    lines += [f"{name} = {text}" for name, text, _ in writer.statements]
    # Compute all values before the first store: a returned expression may read an input that another one overwrites.
    lines += [f"_out{i} = {text}" for i, text in enumerate(results)]
    return [*lines, *(store[target].format(f"_out{i}") for i, target in enumerate(signature.writes))]


def _readable(text: str, writer: Writer) -> str:
    """Return an expression of Python without needless parentheses."""
    return ast.unparse(ast.parse(text.replace(writer.prefix, ""), mode="eval"))
