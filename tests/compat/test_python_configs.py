"""Python configurations are told without running them: what is told is what running them gives, the rest is named."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardwright.compat.configs import read_file
from shardwright.compat.configs.statements import read_assignments

BASE = 'base = dict(size=2, inner=dict(a=1, b=[1, 2]))\nother = {"size": 4, "mode": "mtp"}\n'
TOLD = {
    "expanded": "x = {**base, 'size': 8, **other}\ny = dict(**base, more=1)\n",
    "items": "base['inner']['a'] = 5\nbase['new'] = dict(z=1)\nbase['new']['z'] += 2\nbase['inner']['b'][0] = 9\n",
    "update": "base.update(other, size=3)\nbase.update({'q': 1})\nbase.update([('r', 2)])\nbase |= {'s': 3}\n",
    "alias": "x = base['inner']\nx['a'] = 7\ny = x\ny.update(a=8)\nz = [base]\nz[0]['size'] = 6\n",
    "copies": "import copy\nx = base.copy()\nx['size'] = 1\nx['inner']['a'] = 3\ny = copy.deepcopy(base)\n"
    "y['inner']['a'] = 4\n",
    "methods": "x = base.pop('size')\nbase.setdefault('size', 3)\nbase['inner']['b'].append(3)\ny = base.get('k', 1)\n",
    "lists": "a = [1]\nb = a\nb += [2]\nt = (1,)\nu = t\nu += (2,)\nc = [*a, *t, 3]\n",
    "unpacked": "a, b = 1, 2\na, b = b, a\n(c, d), e = (1, 2), 3\nf = g = {}\ng['x'] = 1\n",
    "branches": "if base['size'] > 1:\n    n = 1\nelse:\n    n = 2\nm = 3 if n == 1 else 4\n"
    "k = n and 5\nj = not n or 'x'\n",
    "loops": "for key in ('a', 'c'):\n    base['inner'][key] = key\n"
    "for key, value in other.items():\n    base[key] = value\n",
    "deleted": "del base['size']\nx = 1\ndel x\n",
    "order": "x = 1\ny = x\nx = 2\nz = f'{x}-{y}'\nw = 'BF16'.lower()\n",
    "walrus": "x = (n := 3) + 1\ny = max(n, 5)\nz = int('7') + len(base)\n",
}


@pytest.mark.parametrize("text", TOLD.values(), ids=TOLD)
def test_what_is_told_is_what_running_gives(text: str) -> None:
    values, unread = read_assignments(BASE + text, "a.py")
    assert values == plain(run(BASE + text))
    assert unread == []


UNTOLD: dict[str, tuple[str, list[str]]] = {
    "expansion": ("x = {'a': 1, **load(), 'b': 2}\n", ["x"]),
    "one value": ("x = dict(a=load(), b=dict(c=load(), d=1), e=[1, load()])\n", ["x.a", "x.b.c", "x.e"]),
    "key": ("base[load()] = 1\n", ["base"]),
    "update": ("base['inner'].update(load())\n", ["base.inner"]),
    "call": ("load(base['inner'])\n", ["base.inner"]),
    "call of an alias": ("x = base['inner']\nload(x)\n", ["base.inner", "x"]),
    "function of the file": ("def patch():\n    base['size'] = 9\npatch()\n", ["base"]),
    "through another": ("def one():\n    base.update(size=9)\ndef two():\n    one()\ntwo()\n", ["base"]),
    "global": ("n = 1\ndef patch():\n    global n\n    n = 2\npatch()\n", ["n"]),
    "branch": ("n = 1\nif load():\n    n = 2\n    base['size'] = 3\n", ["n", "base.size"]),
    "loop": ("n = 1\nfor k in load():\n    n = n + 1\n    base['inner'][k] = 1\n", ["n", "base.inner"]),
    "while": ("n = 1\nwhile load():\n    n = 2\n", ["n"]),
    "try": ("n = 1\ntry:\n    n = load()\nexcept ValueError:\n    n = 1\n", ["n"]),
    "comprehension": ("i = 5\nx = [base.update(size=i) for i in (1, 2)]\n", ["x", "base"]),
    "unhashable": ("x = [each for each in (load(), base.update([[1]]))]\n", ["x", "base"]),
    "odd call": ("base.update(*load())\nbase['inner'].pop({})\n", ["base"]),
    "star": ("from base import *\n", ["from base import *"]),
    "exec": ("exec('n = 1')\n", ["line 3"]),
    "itself": ("base['me'] = base\n", ["base.me"]),
}


@pytest.mark.parametrize(("text", "names"), UNTOLD.values(), ids=UNTOLD)
def test_what_is_not_told_is_named(text: str, names: list[str]) -> None:
    values, unread = read_assignments(BASE + text, "a.py")
    assert [name for name, _ in unread] == names or {name for name, _ in unread} >= set(names)
    for name in names:
        held: Any = values
        *parts, last = name.split(".")
        for part in parts:
            held = held.get(part, {})
        assert last not in held
    assert values.get("other") == {"size": 4, "mode": "mtp"}


def test_random_programs_are_told_right_or_not_at_all() -> None:
    """Whatever `unknown()` gives, a name that is told has what running the file gives."""
    for seed in range(300):
        text = Programs(random.Random(seed)).text()
        values, unread = read_assignments(text, "a.py")
        missing = {name.split(".")[0] for name, _ in unread}
        for answers in ((0, 0), (1, 3), (2, 0), (3, 1)):
            truth = plain(run(text, iter(answers * 100)))
            for name, told in values.items():
                assert agrees(told, truth[name], name, {each for each, _ in unread}), (seed, name, text)
            assert set(truth) <= set(values) | missing | {"i"}, (seed, text)


class Programs:
    """Random files over four names that hold numbers and dicts, many of them one dict under several names."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def text(self) -> str:
        start = "a = {'p': 1, 'q': {'p': 2}}\nb = a\nc = {'p': a['q']}\nn = 1\n"
        return start + "".join(self.statement(0) for _ in range(self.draw.randint(2, 9)))

    def statement(self, depth: int) -> str:
        pad = "    " * depth
        kind = self.draw.randrange(12 if depth < 2 else 8)
        table, key = self.draw.choice(["a", "b", "c"]), self.draw.choice("pqr")
        number = self.draw.choice(["1", "2", "n", "n + 1", "unknown()"])
        if kind <= 1:
            return f"{pad}{table}['{key}'] = {number}\n"
        if kind == 2:
            return f"{pad}{table}.update({key}={number})\n"
        if kind == 3:
            return f"{pad}{table}.update({self.draw.choice('abc')}, x={{'p': {number}}})\n"
        if kind == 4:
            return f"{pad}{table} = {self.draw.choice('abc')}\n"
        if kind == 5:
            return f"{pad}{table} = {{'{key}': {self.draw.choice('abc')}, **{self.draw.choice('abc')}}}\n"
        if kind == 6:
            return f"{pad}n = {number}\n"
        if kind == 7:
            return f"{pad}{table}.setdefault('{key}', {number})\n"
        body = "".join(self.statement(depth + 1) for _ in range(self.draw.randint(1, 3)))
        if kind == 8:
            return f"{pad}if {self.draw.choice(['unknown()', 'n > 1', 'True'])}:\n{body}"
        if kind == 9:
            other = self.statement(depth + 1)
            return f"{pad}if unknown() > 1:\n{body}{pad}else:\n{other}"
        if kind == 10:
            return f"{pad}for i in {self.draw.choice(['(1, 2)', 'range(unknown())', 'range(2)'])}:\n{body}"
        return f"{pad}for i in range(2):\n{body}"


def run(text: str, answers: Any = None) -> dict[str, Any]:
    names: dict[str, Any] = {"unknown": lambda: next(answers)}
    exec(text, names)
    return {
        name: value
        for name, value in names.items()
        if name not in ("__builtins__", "unknown") and type(value).__name__ != "module"
    }


def plain(value: Any, above: tuple[int, ...] = ()) -> Any:
    """As configurations are told: tuples are lists, and a dict that holds itself ends."""
    if id(value) in above:
        return None
    above = (*above, id(value))
    if isinstance(value, dict):
        return {key: plain(each, above) for key, each in value.items()}
    return [plain(each, above) for each in value] if isinstance(value, list | tuple) else value


def agrees(told: Any, true: Any, name: str, unread: set[str]) -> bool:
    if not isinstance(told, dict):
        return bool(told == true)
    if not isinstance(true, dict):
        return False
    named = {each.removeprefix(f"{name}.") for each in unread}
    return set(true) - set(told) <= named and all(
        key in true and agrees(each, true[key], f"{name}.{key}", unread) for key, each in told.items()
    )


def test_sections_of_a_configuration(tmp_path: Any) -> None:
    (tmp_path / "c.py").write_text(
        "base = dict(zero1=dict(size=1), tensor=1)\nparallel = {**base, 'pipeline': dict(size=2)}\n"
        "same = parallel\nsame['tensor'] = dict(size=4, mode='mtp')\nadam = dict(lr=1e-4)\nadam.update(lr=read())\n"
        "data = dict(seq_len=8, micro_bsz=1, micro_num=2)\nfor _ in range(steps()):\n    data['micro_num'] = 4\n"
    )
    _, found = read_file(tmp_path / "c.py")
    assert (found.layout["tp_size"], found.layout["pp_size"]) == (4, 2)
    assert not {"learning_rate", "gradient_accumulation_steps"} & set(found.recipe)
    assert {"adam.lr", "data.micro_num"} <= {note.key for note in found.notes}
