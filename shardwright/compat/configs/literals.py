"""Values of python configuration files, read without running them: constants, containers, arithmetic, dict(...)."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MOST = 2**64  # of a power: a file must not keep the reader busy


class Unreadable(ValueError):
    """An expression that only running it could tell."""


def read_assignments(text: str, file: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Top-level `name = value` of a file; and names with expressions that were not read."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: this is not python ({error.msg})") from None
    values: dict[str, Any] = {}
    unread = []
    for node in tree.body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        expression = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if not isinstance(target, ast.Name) or expression is None:
            continue
        try:
            values[target.id] = evaluate(expression, values)
        except Unreadable as error:
            unread.append((target.id, str(error)))
    return values, unread


def evaluate(node: ast.AST, names: dict[str, Any]) -> Any:
    """The value of an expression over values that are known."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
        return ast.unparse(node)  # torch.bfloat16
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [evaluate(each, names) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {
            evaluate(key, names): evaluate(value, names)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {each.arg: evaluate(each.value, names) for each in node.keywords if each.arg is not None}
    if isinstance(node, ast.Subscript):  # data["total_steps"]
        try:
            return evaluate(node.value, names)[evaluate(node.slice, names)]
        except (LookupError, TypeError):
            raise Unreadable(ast.unparse(node)[:60]) from None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(evaluate(part, names)) for part in node.values)
    if isinstance(node, ast.FormattedValue) and node.format_spec is None:
        return evaluate(node.value, names)
    if isinstance(node, ast.UnaryOp | ast.BinOp):
        return _arithmetic(node, names)
    raise Unreadable(ast.unparse(node)[:60])


def _arithmetic(node: ast.UnaryOp | ast.BinOp, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.UnaryOp):
        value = evaluate(node.operand, names)
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        if isinstance(node.op, ast.Not):
            return not value
        raise Unreadable(ast.unparse(node)[:60])
    left, right = evaluate(node.left, names), evaluate(node.right, names)
    numbers = all(isinstance(each, int | float) for each in (left, right))
    if isinstance(node.op, ast.Pow) and numbers and abs(left) <= _MOST and abs(right) <= 64:
        return left**right
    apply = _ARITHMETIC.get(type(node.op))
    if apply is None or not (numbers or (isinstance(node.op, ast.Add) and type(left) is type(right))):
        raise Unreadable(ast.unparse(node)[:60])
    try:
        return apply(left, right)
    except ZeroDivisionError:
        raise Unreadable(ast.unparse(node)[:60]) from None
