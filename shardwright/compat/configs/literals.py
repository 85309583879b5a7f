"""Values of expressions in python configuration files, told without running them.

What cannot be told is `Unknown`, and so is what is made of it. Containers are kept as one object under all their names,
so that a change under one name is seen under the others.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_MOST = 2**64  # of a power: a file must not keep the reader busy
_LONGEST = 10_000  # elements of a sum of sequences

# Functions that change none of their arguments.
HARMLESS = frozenset(
    (
        *("print", "pprint", "len", "str", "repr", "isinstance", "type", "id", "hash", "any", "all", "sum", "sorted"),
        *("enumerate", "zip", "set", "frozenset", "range", "format", "info", "debug", "warning", "error", "log"),
        *("dumps", "dump", "print_rank_0", "join", "items", "keys", "values", "get", "exists", "getenv"),
    )
)
# Methods that change what they are called on.
CHANGES = frozenset(
    (
        *("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove", "sort", "reverse"),
        *("__setitem__", "__delitem__", "__ior__", "__iadd__"),
    )
)


@dataclass(frozen=True)
class Unknown:
    """A value that only running the file would tell, by what it is written as; a container of `may_be`, or in one."""

    why: str
    may_be: tuple[Any, ...] = field(default=(), compare=False, repr=False)


class Table(dict[Any, Any]):
    """A dict of the file. doubt: a statement that may have changed it in ways that are not followed."""

    doubt: str | None = None


class Row(list[Any]):
    """A list or tuple of the file."""

    doubt: str | None = None
    fixed = False  # a tuple: += makes another


class Module(str):
    """A name in torch, such as torch.bfloat16, as text; what is called on it is not a method of text."""


class Unreadable(Exception):
    """An expression that only running it could tell."""


def written(node: ast.AST) -> str:
    return ast.unparse(node)[:60]


def containers(value: Any, seen: set[int] | None = None) -> Iterator[Table | Row]:
    """`value` and all containers in it."""
    seen = set() if seen is None else seen
    if isinstance(value, Table | Row) and id(value) not in seen:
        seen.add(id(value))
        yield value
        for each in list(value.values() if isinstance(value, Table) else value):
            yield from containers(each, seen)
    elif isinstance(value, Unknown):
        for each in value.may_be:
            yield from containers(each, seen)


def doubt(value: Any, why: str) -> None:
    """What `value` holds may be something else now."""
    for container in containers(value):
        container.doubt = container.doubt or why


def finished(value: Any, name: str, unread: list[tuple[str, str]], above: tuple[int, ...] = ()) -> Any:
    """`value` as plain dicts and lists, without what is unknown, whose dotted names come to `unread`; Unknown where
    nothing is left.
    """
    if isinstance(value, Table | Row):
        if value.doubt is not None or id(value) in above:
            why = value.doubt or "a container that holds itself"
            unread.append((name, why))
            return Unknown(why)
        above = (*above, id(value))
    if isinstance(value, Module):
        return str(value)
    if isinstance(value, Table):
        found = {key: finished(each, f"{name}.{key}", unread, above) for key, each in value.items()}
        return {key: each for key, each in found.items() if not isinstance(each, Unknown)}
    if isinstance(value, Row):
        inner: list[tuple[str, str]] = []
        row = [finished(each, name, inner, above) for each in value]
        if not inner:
            return row
        value = Unknown(inner[0][1])  # one element of a list alone has no name
    if isinstance(value, Unknown):
        unread.append((name, value.why))
    return value


class Expressions:
    """Tells values over the names that are known."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.tell: dict[type[ast.AST], Callable[[Any], Any]] = {
            ast.Constant: lambda node: node.value,
            ast.Name: lambda node: self.names.get(node.id, Unknown(node.id)),
            ast.Attribute: self._attribute,
            ast.List: self._row,
            ast.Tuple: self._row,
            ast.Set: self._row,
            ast.Dict: self._table,
            ast.Call: self._call,
            ast.Subscript: self._element,
            ast.JoinedStr: self._text,
            ast.FormattedValue: self._text_part,
            ast.UnaryOp: self._negated,
            ast.BinOp: lambda node: self.joined(node.op, self.value(node.left), self.value(node.right)),
            ast.BoolOp: self._logic,
            ast.Compare: self._compared,
            ast.IfExp: self._either,
            ast.NamedExpr: self._named,
        }

    def unknown_call(self, node: ast.Call, arguments: list[tuple[str | None, Any]]) -> Any:
        """A call of something that is not followed; `arguments` by name, None where they have none, behind `self`."""
        raise NotImplementedError

    def value(self, node: ast.AST) -> Any:
        """The value of an expression, Unknown where it cannot be told; what is changed in it is changed."""
        found = self._value(node)
        if not isinstance(found, Unknown) or found.may_be:
            return found
        named = (self.names.get(each.id) for each in ast.walk(node) if isinstance(each, ast.Name))
        return Unknown(found.why, tuple(each for each in named if isinstance(each, Table | Row | Unknown)))

    def _value(self, node: ast.AST) -> Any:
        tell = self.tell.get(type(node))
        try:
            if tell is not None:
                return tell(node)
        except (Unreadable, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            return Unknown(written(node))
        self.not_followed(node)  # a comprehension, a lambda: what is called in it may change something
        return Unknown(written(node))

    def not_followed(self, node: ast.AST) -> None:
        """An expression of a kind that is not followed."""
        raise NotImplementedError

    def known(self, node: ast.AST) -> Any:
        """The value, or Unreadable."""
        value = self.value(node)
        if isinstance(value, Unknown):
            raise Unreadable
        return value

    def _attribute(self, node: ast.Attribute) -> Any:
        self.value(node.value)
        text = written(node)
        return Module(text) if text.startswith("torch.") else Unknown(text)  # torch.bfloat16

    def _row(self, node: ast.List | ast.Tuple | ast.Set) -> Row:
        row = Row()
        for each in node.elts:
            if isinstance(each, ast.Starred):
                row.extend(self._elements(self.known(each.value)))
            else:
                row.append(self.value(each))
        row.fixed = isinstance(node, ast.Tuple)
        return row

    def _elements(self, value: Any) -> list[Any]:
        if not isinstance(value, Row) or value.doubt is not None:
            raise Unreadable
        return list(value)

    def _table(self, node: ast.Dict) -> Table:
        return self.table([(key, self.value(value)) for key, value in self._keys(node)])

    def _keys(self, node: ast.Dict) -> Iterator[tuple[Any, ast.expr]]:
        for key, value in zip(node.keys, node.values, strict=True):
            yield (None if key is None else self.value(key)), value

    def table(self, items: list[tuple[Any, Any]]) -> Table:
        """A dict of keys and values; the key None stands for `**value`."""
        found = Table()
        for key, value in items:
            if key is None:
                merge(found, value, "**")
            elif isinstance(key, Unknown | Table | Row):
                found.doubt = f"the key {key.why}" if isinstance(key, Unknown) else "a key that is a container"
            else:
                found[key] = value
        return found

    def _call(self, node: ast.Call) -> Any:
        function = node.func
        on = self.value(function.value) if isinstance(function, ast.Attribute) else None
        arguments: list[tuple[str | None, Any]] = []
        for each in node.args:
            starred = isinstance(each, ast.Starred)
            arguments.append(
                ("*" if starred else None, self.value(each.value if isinstance(each, ast.Starred) else each))
            )
        arguments += [(each.arg or "**", self.value(each.value)) for each in node.keywords]
        known = isinstance(on, Table | Row) or (isinstance(on, str) and not isinstance(on, Module))
        if isinstance(function, ast.Attribute) and known:
            found = self._method(node, on, function.attr, arguments)
        elif written(function) in _COPIES and arguments:
            value = arguments[0][1]
            found = _copied(value, deep=written(function).endswith("deepcopy"))
        elif isinstance(function, ast.Name) and function.id in _BUILTINS and function.id not in self.names:
            found = self._builtin(node, function.id, arguments)
        else:
            found = self.unknown_call(node, [("self", on), *arguments])
        return found

    def _builtin(self, node: ast.Call, name: str, arguments: list[tuple[str | None, Any]]) -> Any:
        values = [value for key, value in arguments if key is None]
        if name == "dict":
            items: list[tuple[Any, Any]] = []
            for key, value in arguments:
                if key is None and isinstance(value, Row):
                    items += [tuple(pair) for pair in value]  # dict([("a", 1)])
                else:
                    items.append((None if key in (None, "**") else key, value))
            return self.table(items)
        if len(values) != len(arguments) or any(
            isinstance(value, Unknown) or getattr(value, "doubt", None) for value in values
        ):
            raise Unreadable
        if name in ("list", "tuple"):
            (given,) = values or [Row()]
            row = Row(given)
            row.fixed = name == "tuple"
            return row
        return _BUILTINS[name](*values)

    def _method(self, node: ast.Call, on: Any, name: str, arguments: list[tuple[str | None, Any]]) -> Any:
        values = [value for key, value in arguments if key is None]
        if isinstance(on, str):
            if name not in ("lower", "upper", "strip") or arguments:
                raise Unreadable
            return getattr(on, name)()
        if name == "update" and isinstance(on, Table):
            for key, value in arguments:
                if key is None and isinstance(value, Row):
                    value = self.table([tuple(pair) for pair in value])
                if key in (None, "*", "**"):
                    merge(on, value, "update of")
                else:
                    on[key] = value
            return None
        if name == "copy":
            return _copied(on, deep=False)
        changes = name in CHANGES
        plain = len(values) == len(arguments)
        allowed = ("setdefault", "pop", "clear") if isinstance(on, Table) else _ROW_METHODS
        if changes and plain and name in allowed and not isinstance(values[0] if values else None, Unknown | Table):
            if name == "extend":
                values = [self._elements(values[0])]
            if on.doubt is None:
                return getattr(on, name)(*values)
        if changes:
            doubt(on, f"{written(node)}, line {node.lineno}, may change it")
            raise Unreadable
        if name == "get" and isinstance(on, Table) and on.doubt is None and plain and values:
            if isinstance(values[0], Unknown):
                raise Unreadable
            return on.get(*values)
        if name in ("keys", "values", "items") and isinstance(on, Table) and on.doubt is None:
            if name == "items":
                return Row(Row(pair) for pair in on.items())
            return Row(getattr(on, name)())
        raise Unreadable

    def _element(self, node: ast.Subscript) -> Any:
        container, key = self.known(node.value), self.known(node.slice)
        if getattr(container, "doubt", None) is not None:
            return Unknown(f"{written(node)} ({container.doubt})")
        return container[key]

    def _text(self, node: ast.JoinedStr) -> str:
        return "".join(str(self.known(part)) for part in node.values)

    def _text_part(self, node: ast.FormattedValue) -> Any:
        if node.format_spec is not None:
            raise Unreadable
        return self.known(node.value)

    def _negated(self, node: ast.UnaryOp) -> Any:
        value = self.known(node.operand)
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        if isinstance(node.op, ast.Not):
            return not value
        raise Unreadable

    def joined(self, op: ast.operator, left: Any, right: Any) -> Any:
        """left op right."""
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            raise Unreadable
        numbers = all(isinstance(each, int | float) for each in (left, right))
        if isinstance(op, ast.Pow) and numbers and abs(left) <= _MOST and abs(right) <= 64:
            return left**right
        if isinstance(op, ast.BitOr) and isinstance(left, Table) and isinstance(right, Table):
            return self.table([(None, left), (None, right)])
        if isinstance(op, ast.Add) and isinstance(left, Row) and isinstance(right, Row):
            if len(left) + len(right) > _LONGEST:
                raise Unreadable
            return _rowed([*self._elements(left), *self._elements(right)], left)
        texts = isinstance(left, str) and isinstance(right, str) and len(left) + len(right) <= _LONGEST
        apply = _ARITHMETIC.get(type(op))
        if apply is None or not (numbers or (isinstance(op, ast.Add) and texts)):
            raise Unreadable
        return apply(left, right)

    def _logic(self, node: ast.BoolOp) -> Any:
        for each in node.values:
            value = self.known(each)
            if bool(value) == isinstance(node.op, ast.Or):
                return value
        return value

    def _compared(self, node: ast.Compare) -> bool:
        left = self.known(node.left)
        for op, each in zip(node.ops, node.comparators, strict=True):
            right = self.known(each)
            if any(isinstance(one, Table | Row) and one.doubt for one in (left, right)):
                raise Unreadable
            if not _COMPARED[type(op)](left, right):
                return False
            left = right
        return True

    def _either(self, node: ast.IfExp) -> Any:
        test = self.value(node.test)
        if not isinstance(test, Unknown):
            return self.value(node.body if test else node.orelse)
        left, right = self.known(node.body), self.known(node.orelse)
        if left != right or isinstance(left, Table | Row):
            raise Unreadable
        return left

    def _named(self, node: ast.NamedExpr) -> Any:
        value = self.names[node.target.id] = self.value(node.value)
        return value


def merge(into: Table, given: Any, how: str) -> None:
    """`into.update(given)`, where what is not known of `given` may be any key."""
    if isinstance(given, Table):
        into.update(given)
    why = given.why if isinstance(given, Unknown) else getattr(given, "doubt", None)
    if why is not None or not isinstance(given, Table):
        into.doubt = into.doubt or f"{how} {why or repr(given)[:60]}"


def _copied(value: Any, deep: bool) -> Any:
    return copy.deepcopy(value) if deep else copy.copy(value)


def _rowed(values: list[Any], like: Row) -> Row:
    row = Row(values)
    row.fixed = like.fixed
    return row


_COPIES = ("copy.deepcopy", "deepcopy", "copy.copy")
_ROW_METHODS = ("append", "extend", "insert", "pop", "clear", "remove", "reverse")
_BUILTINS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "len": len,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
}
