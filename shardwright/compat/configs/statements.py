"""Python configuration files and scripts, followed statement by statement without running them.

A branch whose condition is not known is followed both ways, and what differs behind it is unknown.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .literals import (
    CHANGES,
    HARMLESS,
    Expressions,
    Row,
    Table,
    Unknown,
    Unreadable,
    containers,
    doubt,
    finished,
    merge,
    written,
)

_MOST_STATEMENTS = 100_000  # that are followed, those of loops as often as they come
_MOST_TURNS = 64  # of a loop over values that are known
_ANYTHING = ("exec", "eval", "globals", "locals", "vars", "setattr", "delattr")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Called(NamedTuple):
    """A call that was asked for. arguments: (name, None where it has none, or `**`; value, Unknown where not told)."""

    node: ast.Call
    arguments: list[tuple[str | None, Any]]


def read_assignments(text: str, file: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What the top-level names of a file hold at its end; and dotted names of what was not read, with its text."""
    followed = Statements(file)
    followed.run(parse(text, file).body)
    unread: list[tuple[str, str]] = []
    values = {name: finished(value, name, unread) for name, value in followed.names.items()}
    known = {name: value for name, value in values.items() if not isinstance(value, Unknown)}
    return known, [*unread, *followed.untold]


def parse(text: str, file: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: this is not python ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: this is not python ({error})") from None


class Statements(Expressions):
    """asked: names of functions and classes whose calls are kept in `calls`, by the line and column of each.

    untold   statements that bring names which are not followed
    """

    def __init__(self, file: str, asked: Callable[[str], bool] | None = None) -> None:
        super().__init__()
        self.file, self.asked = file, asked or (lambda name: False)
        self.calls: dict[tuple[int, int], Called] = {}
        self.functions: dict[str, ast.AST] = {}
        self.untold: list[tuple[str, str]] = []
        self.steps = 0
        self.follow: dict[type[ast.AST], Callable[[Any], None]] = {
            ast.Assign: self._assign,
            ast.AnnAssign: self._annotated,
            ast.AugAssign: self._changed,
            ast.Delete: self._deleted,
            ast.If: self._if,
            ast.For: self._for,
            ast.AsyncFor: self._for,
            ast.While: self._while,
            ast.With: self._with,
            ast.AsyncWith: self._with,
            ast.Try: self._try,
            ast.Match: self._match,
            ast.Import: self._imported,
            ast.ImportFrom: self._imported,
            ast.FunctionDef: self._defined,
            ast.AsyncFunctionDef: self._defined,
            ast.ClassDef: self._defined,
        }

    def run(self, statements: Sequence[ast.stmt]) -> None:
        for node in statements:
            self.steps += 1
            if self.steps > _MOST_STATEMENTS:
                raise ValueError(f"{self.file}, line {node.lineno}: there is too much to follow; write the values out")
            follow = self.follow.get(type(node))
            if follow is not None:
                follow(node)
                continue
            for each in ast.iter_child_nodes(node):  # an expression, a return, an assertion
                if isinstance(each, ast.expr):
                    self.value(each)

    def run_function(self, node: _Function) -> None:
        """The body of a function whose arguments are not known, over the globals as they are now."""
        outside = self.names
        told = {name for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names}
        stored = {
            each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
        }
        parameters = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        self.names = {name: value for name, value in outside.items() if name not in (stored - told) | parameters}
        self.run(node.body)
        self.names = outside

    def unknown_call(self, node: ast.Call, arguments: list[tuple[str | None, Any]]) -> Any:
        name = written(node.func).rpartition(".")[2]
        if self.asked(name):
            self._keep(node, arguments[1:])
            return Unknown(written(node))
        why = f"{written(node)}, line {node.lineno}, may change it"
        if isinstance(node.func, ast.Name) and name in _ANYTHING:
            self.untold.append((f"line {node.lineno}", written(node)))
        if name not in HARMLESS:
            for _, value in arguments:
                doubt(value, why)
        if isinstance(node.func, ast.Name) and name in self.functions:
            self._doubt_within(self.functions[name], why, {name})
        return Unknown(written(node))

    def _keep(self, node: ast.Call, arguments: list[tuple[str | None, Any]]) -> None:
        found: list[tuple[str | None, Any]] = []
        for name, value in arguments:
            if name == "**" and isinstance(value, Table) and value.doubt is None:
                found += [(str(key), _told(each)) for key, each in value.items()]
            elif name == "*" and isinstance(value, Row) and value.doubt is None:
                found += [(None, _told(each)) for each in value]
            else:
                found.append((name, _told(value)))
        place = (node.lineno, node.col_offset)
        before = self.calls.get(place)
        if before is not None and before.arguments != found:  # in a loop
            found = [(name, Unknown("another in each turn")) for name, _ in found]
        self.calls[place] = Called(node, found)

    def not_followed(self, node: ast.AST) -> None:
        self._doubt_within(node, f"{written(node)} may change it", set())

    def _doubt_within(self, body: ast.AST, why: str, seen: set[str]) -> None:
        """What the body of a function of the file, or an expression, may change outside of it."""
        for node in ast.walk(body):
            roots: list[ast.AST] = []
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                roots.append(node.value)
            elif isinstance(node, ast.Call):
                called = written(node.func).rpartition(".")[2]
                if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                    roots.append(node.func.value)
                if called not in HARMLESS:
                    roots += [*node.args, *(each.value for each in node.keywords)]
                if isinstance(node.func, ast.Name) and called in self.functions and called not in seen:
                    seen.add(called)
                    self._doubt_within(self.functions[called], why, seen)
            elif isinstance(node, ast.Return) and node.value is not None:
                roots.append(node.value)
            elif isinstance(node, ast.Global):
                for each in node.names:
                    self.names[each] = Unknown(why)
            for root in roots:
                for inner in ast.walk(root):
                    if isinstance(inner, ast.Name):
                        doubt(self.names.get(inner.id), why)

    def _assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.store(target, value, node)

    def _annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.store(node.target, self.value(node.value), node)

    def store(self, target: ast.AST, value: Any, node: ast.stmt) -> None:
        """`target = value`."""
        if isinstance(target, ast.Name):
            self.names[target.id] = value
            self.functions.pop(target.id, None)
        elif isinstance(target, ast.Tuple | ast.List):
            plain = not any(isinstance(each, ast.Starred) for each in target.elts)
            fits = isinstance(value, Row) and value.doubt is None and plain and len(value) == len(target.elts)
            for at, each in enumerate(target.elts):
                unknown = Unknown(written(node))
                self.store(each.value if isinstance(each, ast.Starred) else each, value[at] if fits else unknown, node)
        elif isinstance(target, ast.Subscript):
            container, key = self.value(target.value), self.value(target.slice)
            self._store_element(container, key, value, node)

    def _store_element(self, container: Any, key: Any, value: Any, node: ast.stmt) -> None:
        inside = isinstance(container, Row) and isinstance(key, int) and -len(container) <= key < len(container)
        if inside or (isinstance(container, Table) and not isinstance(key, Unknown | Table | Row)):
            container[key] = value
        else:
            doubt(container, f"{written(node)}, line {node.lineno}, may change it")
        if key == "lr" and isinstance(container, Unknown):
            self.untold.append(("lr", f"{written(node)}, line {node.lineno}"))

    def _changed(self, node: ast.AugAssign) -> None:
        load = copy.copy(node.target)
        load.ctx = ast.Load()
        before, given = self.value(load), self.value(node.value)
        if isinstance(before, Table) and isinstance(node.op, ast.BitOr):
            merge(before, given, "|=")
            return
        if isinstance(before, Row) and not before.fixed and isinstance(node.op, ast.Add):
            if isinstance(given, Row) and given.doubt is None:
                before.extend(given)
            else:
                doubt(before, f"{written(node)}, line {node.lineno}, may change it")
            return
        try:
            after = self.joined(node.op, before, given)
        except (Unreadable, TypeError, ValueError, ArithmeticError):
            after = Unknown(written(node))
        self.store(node.target, after, node)

    def _deleted(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names.pop(target.id, None)
            elif isinstance(target, ast.Subscript):
                container, key = self.value(target.value), self.value(target.slice)
                if isinstance(container, Table) and not isinstance(key, Unknown | Table | Row):
                    container.pop(key, None)
                else:
                    doubt(container, f"{written(node)}, line {node.lineno}, may change it")

    def _if(self, node: ast.If) -> None:
        test = self.value(node.test)
        if not isinstance(test, Unknown):
            self.run(node.body if test else node.orelse)
        else:
            self.branch([node.body, node.orelse])

    def branch(self, bodies: Sequence[Sequence[ast.stmt]]) -> None:
        """One of several bodies is run: what they leave behind in different ways is unknown."""
        before, functions, ends = self.names, dict(self.functions), []
        for body in bodies:
            self.names = copy.deepcopy(before)
            self.run(body)
            ends.append(self.names)
            functions |= self.functions
        self.functions = functions
        # A value that each branch leaves as it was is kept; the objects are those of the first.
        self.names = ends[0]
        for other in ends[1:]:
            _Common().keep(self.names, other)

    def _for(self, node: ast.For) -> None:
        over = self.value(node.iter)
        if isinstance(over, Table) and over.doubt is None:
            over = Row(over)
        jumps = any(isinstance(each, ast.Break | ast.Continue | ast.Return) for each in ast.walk(node))
        if isinstance(over, Row) and over.doubt is None and len(over) <= _MOST_TURNS and not jumps:
            for each in list(over):
                self.store(node.target, each, node)
                self.run(node.body)
            self.run(node.orelse)
            return
        turn = [each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)]
        self.names |= dict.fromkeys(turn, Unknown(written(node.target), (over,)))
        self._turns(node.body)
        for each in turn:
            self.names.pop(each, None)
        self.run(node.orelse)

    def _while(self, node: ast.While) -> None:
        if self.value(node.test) is not False:
            self._turns(node.body)
        self.run(node.orelse)

    def _turns(self, body: Sequence[ast.stmt]) -> None:
        """Any number of turns: what the first two change is unknown."""
        for _ in range(2):
            self.branch([body, []])

    def _with(self, node: ast.With) -> None:
        for item in node.items:
            given = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.store(item.optional_vars, Unknown(written(item.context_expr), (given,)), node)
        self.run(node.body)

    def _try(self, node: ast.Try) -> None:
        self.branch([[*node.body, *node.orelse], *([*node.body, *each.body] for each in node.handlers)])
        if node.handlers:  # or what had been run of the body when it failed
            self.branch([[], *(each.body for each in node.handlers)])
        self.run(node.finalbody)

    def _match(self, node: ast.Match) -> None:
        self.value(node.subject)
        self.branch([*(case.body for case in node.cases), []])

    def _imported(self, node: ast.Import | ast.ImportFrom) -> None:
        for each in node.names:
            if each.name == "*":
                self.untold.append((written(node), "the names of another file"))
            else:
                self.names.pop((each.asname or each.name).partition(".")[0], None)

    def _defined(self, node: _Function | ast.ClassDef) -> None:
        self.names.pop(node.name, None)
        self.functions[node.name] = node


def _told(value: Any) -> Any:
    unread: list[tuple[str, str]] = []
    found = finished(value, "", unread)
    return Unknown(unread[0][1]) if unread else found


class _Common:
    """What two branches leave alike is kept, in the objects of the first; the rest becomes unknown there."""

    def __init__(self) -> None:
        self.ours: dict[int, int] = {}  # the container of the other branch that stands for one of ours
        self.theirs: dict[int, Any] = {}
        self.doubtful: set[int] = set()  # containers of the other branch

    def keep(self, ours: dict[Any, Any], other: dict[Any, Any]) -> None:
        self._keep(ours, other)
        for container in self.doubtful:
            doubt(self.theirs.get(container), _OTHERWISE)

    def _keep(self, ours: dict[Any, Any], other: dict[Any, Any]) -> None:
        for key in [*ours, *(key for key in other if key not in ours)]:
            left, right = (each.get(key, Unknown(_OTHERWISE)) for each in (ours, other))
            if isinstance(left, Table | Row) and isinstance(right, Table | Row):
                self._keep_container(left, right)
            elif key not in ours or type(left) is not type(right) or left != right:
                self._differ(left, right)
                ours[key] = left if isinstance(left, Unknown) else Unknown(_OTHERWISE)

    def _differ(self, left: Any, right: Any) -> None:
        """Under one name containers of either branch may be changed from here on."""
        doubt(left, _OTHERWISE)
        self.doubtful |= {id(each) for each in containers(right)}

    def _keep_container(self, left: Table | Row, right: Table | Row) -> None:
        if self.ours.get(id(left)) == id(right):
            return
        apart = id(left) in self.ours or id(right) in self.theirs  # it has other names in the other branch
        alike = type(left) is type(right) and (isinstance(left, Table) or len(left) == len(right))
        if apart or not alike:
            self._differ(left, right)
            return
        self.ours[id(left)], self.theirs[id(right)] = id(right), left
        if right.doubt is not None:
            doubt(left, right.doubt)
        if isinstance(left, Table) and isinstance(right, Table):
            self._keep(left, right)
        else:
            inner = dict(enumerate(left))
            self._keep(inner, dict(enumerate(right)))
            left[:] = inner.values()


_OTHERWISE = "another value in another branch"
