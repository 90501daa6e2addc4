"""Rewrites functions for a trace, whose methods take the place of calls and of what would ask for a truth value."""

from __future__ import annotations

import ast
from types import CellType, FunctionType
from typing import Any

from .syntax import Source, codes

#: The name under which rewritten code has the trace.
_TRACE = "__pagedopt_trace__"
_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip


class _Rewriter(ast.NodeTransformer):
    """Puts calls of the trace in the place of what would ask for a truth value, and of calls."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        branches = (_lambda(self.visit(branch)) for branch in (node.body, node.orelse))
        return _hook(node, "choice", self._condition(node.test), *branches)

    def visit_BoolOp(self, node: ast.BoolOp, condition: bool = False) -> ast.expr:
        first, *rest = map(self._condition if condition else self.visit, node.values)
        op = ast.Constant("and" if isinstance(node.op, ast.And) else "or")
        return _hook(node, "joined", op, ast.Constant(condition), first, *map(_lambda, rest))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        is_not = isinstance(node.op, ast.Not)
        return _hook(node, "denied", self._condition(node.operand)) if is_not else self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        links = zip(node.ops, map(self.visit, node.comparators), strict=True)
        texts = (x for op, value in links for x in (ast.Constant(_OPERATORS[type(op)]), _lambda(value)))
        return _hook(node, "compared", self.visit(node.left), *texts)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        made = _hook(node, "call", node.func, *node.args)
        made.keywords = node.keywords
        return made

    def visit_Assign(self, node: ast.Assign | ast.AugAssign) -> list[ast.stmt]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        named = (_hook(node, "named", ast.Constant(name), ast.Name(name, ast.Load())) for name in names)
        self.generic_visit(node)
        return [node, *(ast.copy_location(ast.Expr(call), node) for call in named)]

    visit_AugAssign = visit_Assign

    def _condition(self, node: ast.expr) -> Any:
        return self.visit_BoolOp(node, True) if isinstance(node, ast.BoolOp) else self.visit(node)


def _lambda(body: ast.expr) -> ast.Lambda:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(nothing, body), body)


def _hook(node: Any, name: str, *args: ast.expr) -> ast.Call:
    made = ast.Call(ast.Attribute(ast.Name(_TRACE, ast.Load()), name, ast.Load()), list(args), [])
    return ast.fix_missing_locations(ast.copy_location(made, node))


def rewritten(function: FunctionType, source: Source, trace: object) -> FunctionType:
    """Return ``function`` with its source rewritten: it calls methods of ``trace``."""
    tree, free = _Rewriter().visit(source.read()), function.__code__.co_freevars
    # Decorators, annotations and defaults are evaluated outside of the function: they are no part of its code.
    tree.decorator_list, tree.returns, tree.name = [], None, f"{_TRACE}d"
    tree.args.defaults, tree.args.kw_defaults = [], [None] * len(tree.args.kwonlyargs)
    for arg in ast.walk(tree.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    scope = ast.parse(f"def scope():\n    {' = '.join((*free, _TRACE))} = None")
    scope.body[0].body.append(tree)  # type: ignore[attr-defined]
    code = next(c for c in codes(compile(scope, source.file, "exec", dont_inherit=True)) if c.co_name == tree.name)
    code = code.replace(co_name=function.__name__, co_qualname=function.__qualname__)
    cells = dict(zip(free, function.__closure__ or (), strict=True)) | {_TRACE: CellType(trace)}
    closure = tuple(cells[name] for name in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
