"""Random mutants: faults that nobody thought of, each one small change of a file's text."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A text that stands once in a file, and what takes its place."""

    what: str
    #: Below the project's root.
    file: str
    before: str
    after: str
    #: Arguments of pytest: the test that has to find it.
    test: str = ""


#: What an operator becomes, here and the other way round.
OTHERS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn, ast.Add: ast.Sub,
    ast.Mult: ast.FloorDiv,
}  # fmt: skip
OTHERS |= {other: operator for operator, other in OTHERS.items()}


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield parts of a node, each with a text that may take its place."""
    match node:
        case ast.If(test=part) | ast.While(test=part) | ast.IfExp(test=part):
            yield part, f"(not ({ast.unparse(part)}))"
        case ast.comprehension(ifs=[part, *_]):
            yield part, "True"
        case ast.BoolOp(op=operator, values=[first, *_, last]):
            for part in (first, last):
                yield part, "True" if isinstance(operator, ast.And) else "False"
        case ast.Compare(left=left, ops=[operator], comparators=right) if type(operator) in OTHERS:
            yield node, ast.unparse(ast.Compare(left, [OTHERS[type(operator)]()], right))
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OTHERS:
            yield node, ast.unparse(ast.BinOp(left, OTHERS[type(operator)](), right))
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield node, "pass"
        case ast.Return(value=ast.expr() as part) if not isinstance(part, ast.Constant):
            yield part, "None"
        case ast.Continue():
            yield node, "break"
        case ast.Break():
            yield node, "continue"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)


def mutants(file: str, text: str) -> Iterator[Fault]:
    """Yield every mutant of a file, in the order of its nodes."""
    data = text.encode()  # the columns of nodes are bytes
    lines = [0, *accumulate(len(line) for line in data.splitlines(keepends=True))]
    for node in nodes(ast.parse(text)):
        for part, after in changes(node):
            at: Any = part
            first, last = lines[at.lineno - 1] + at.col_offset, lines[at.end_lineno - 1] + at.end_col_offset
            before = data[first:last].decode()
            what = f"line {at.lineno}: {shorten(before, 80)} → {shorten(after, 90)}"
            yield once(Fault(what, file, before, after), data[:first].decode(), data[last:].decode())


def once(mutant: Fault, above: str, below: str) -> Fault:
    """Return a mutant with as many lines from above and below its text as make it stand in the file once."""
    text = above + mutant.before + below
    lines, head, tail = 0, "", ""
    while text.count(head + mutant.before + tail) > 1:
        lines += 1
        head, tail = "".join(above.splitlines(True)[-lines:]), "".join(below.splitlines(True)[:lines])
    return mutant._replace(before=head + mutant.before + tail, after=head + mutant.after + tail)


def nodes(parent: ast.AST) -> Iterator[ast.AST]:
    """Yield what is below a node; not what no test should look at: messages, annotations, imports for type checkers."""
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.arguments():
                continue
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                continue
        yield node
        yield from nodes(node)


def draw(root: Path, files: list[str], count: int, seed: int) -> list[Fault]:
    """Return ``count`` mutants of the files that these patterns name below ``root``: the same for the same seed.

    Raises:
        ValueError: a pattern names no file, or there are fewer mutants.
    """
    for pattern in files:
        if not any(root.glob(pattern)):
            raise ValueError(f"no file is called {pattern}; name one below {root}")
    paths = sorted({path for pattern in files for path in root.glob(pattern)})
    found = [mutant for path in paths for mutant in mutants(str(path.relative_to(root)), path.read_text())]
    if count > len(found):
        raise ValueError(
            f"{count} mutants are asked for, and there are {len(found)}; ask for fewer, or name more files"
        )
    return random.Random(seed).sample(found, count)
