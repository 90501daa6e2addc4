"""Lines of code, without comments, docstrings and blank lines."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path

#: Tokens that are no code.
NAMES = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
SILENT = [getattr(tokenize, name) for name in NAMES]


def of_python(text: str, functions: Sequence[str] = ()) -> int:
    """Lines of Python: of everything, or of these functions and classes with their decorators.

    Raises:
        ValueError: there is no such function or class.
    """
    tree = ast.parse(text)
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if not functions:
        return len(code)
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = {node.name: node for node in tree.body if isinstance(node, kinds) and node.name in functions}
    if missing := set(functions) - found.keys():
        raise ValueError(f"there is no function or class {', '.join(sorted(missing))}")
    spans = [(min([n.lineno, *(d.lineno for d in n.decorator_list)]), n.end_lineno or n.lineno) for n in found.values()]
    return sum(first <= line <= last for line in code for first, last in spans)


def of_cuda(text: str) -> int:
    """Lines of C++ or CUDA."""
    bare = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return sum(bool(line.partition("//")[0].strip()) for line in bare.splitlines())


def of_files(paths: Iterable[Path]) -> int:
    """Lines of files of either kind, and of all such files in folders."""
    found = [inner for path in paths for inner in (path.rglob("*") if path.is_dir() else [path])]
    python = sum(of_python(path.read_text()) for path in found if path.suffix == ".py")
    return python + sum(of_cuda(path.read_text()) for path in found if path.suffix in (".cu", ".cuh"))
