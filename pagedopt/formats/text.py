"""What a format's text for Numba may be, as far as that can be said without compiling it."""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Collection
from typing import Literal

#: Functions that any text may call: those that rules call, and the two between uint32 bits and a float32.
FUNCTIONS = frozenset({
    "bits_of", "element_abs", "element_either", "element_exp", "element_fma", "element_log", "element_max",
    "element_min", "element_sign", "element_sqrt", "float_of",
})  # fmt: skip


def check_text(what: str, text: str, names: Collection[str], kind: Literal["eval", "exec"]) -> None:
    """See that a text is Python, an expression (``eval``) or statements (``exec``), and knows the names that it uses.

    Args:
        what: how errors begin.
        names: those there are, besides ``FUNCTIONS``, what Python has built in and what the text itself assigns.

    Raises:
        ValueError: it is not.
    """
    needed = "an expression" if kind == "eval" else "statements"
    text = textwrap.dedent(text).strip("\n")
    empty = ValueError(f"{what} is empty; give {needed}, from which kernels for the CPU are made")
    if not text.strip():
        raise empty
    try:
        tree = ast.parse(text, mode=kind)
    except SyntaxError as error:
        line = (error.text or text).strip()
        raise ValueError(f"{what} is not {needed} of Python: {error.msg}, in {line!r}") from None
    if isinstance(tree, ast.Module) and not tree.body:
        raise empty
    used = {node.id: node for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if unknown := [name for name in used if name not in {*own, *names, *FUNCTIONS} and not hasattr(builtins, name)]:
        raise ValueError(
            f"{what} uses the name {unknown[0]}; there are {', '.join(sorted(names))}, and the functions "
            f"{', '.join(sorted(FUNCTIONS))}"
        )
