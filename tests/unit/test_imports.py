"""Guards over who imports whom. The table of levels is the one in docs/architecture.md."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardwright"

LEVELS = {
    "utils": 0,
    "spec": 0,
    "accelerator": 0,
    "logging": 0,
    "_version": 0,
    "_moved": 0,
    "cluster": 1,
    "comm": 1,
    "files": 1,
    "models": 1,
    "ops": 2,
    "kernels": 2,
    "lazy": 2,
    "interface": 2,
    "optim": 2,
    "precision": 3,
    "attention": 3,
    "shardformer": 4,
    "pipeline": 4,
    "zero": 4,
    "checkpoint": 4,
    "plugins": 5,
    "booster": 6,
    "compat": 7,
    "elastic": 7,
    "trainer": 7,
    "planner": 7,
    "cli": 8,
}
STRANGERS = ("shardformer", "pipeline", "zero", "checkpoint")  # of one level, and none may import another

TRANSFORMERS_ALLOWED = (
    "attention/register",
    "lazy/from_pretrained",
    "files/hf_names",
    "pipeline/slices/past_keys",
    "attention/sequence_modes",
    "shardformer/modeling/",
    "cli/",
    "trainer/",
)
# File and why it may use private names of torch; each use states the version it was checked on.
PRIVATE_TORCH_ALLOWED = {
    "comm/compat": "names that changed between versions",
    "cluster/launch": "the store of the fake backend and that of the default group, which have no public name",
    "cluster/groups": "all groups of the process, and the backends behind them",
    "plugins/torch_ddp": "which backward is running, and the buckets of DistributedDataParallel, which have no public "
    "name",
    "plugins/data/input_limits": "asserting on the device without waiting for it, which has no public name",
    "booster/anomaly/place": "the number of a node of the backward, and which one runs: no public name",
    "ops/layer_graphs": "errors of dynamo, backends and their edits of graphs, modes in effect: no public name",
    "ops/compiled_numbers": "the order of nodes for inductor, and operators as nodes name them: no public name",
    "ops/hooks_inside": "hooks of all modules, of which no public name says whether there are any",
    "ops/compiled_sequence": "giving up on a graph with a reason: no public name",
    "planner/fake_kernels": "fakes, and what they are made of",
    "planner/fakes": "tensors without memory, which have no public name",
    "planner/gradient_sums": "how often a tensor is referred to, and autograd's engine, which have no public name",
    "planner/live_bytes": "whether a storage lives, which has no public name",
    "testing/matrix/cell": "a backend of dynamo with another table of decompositions: no public name",
    "utils/labels": "whether a profiler records, which has no public name",
    "utils/memory_notes": "being told of an error for want of memory before it is raised: no public name",
    "utils/torch_names": "fakes, attention and turning modes off, which have no public name",
    "utils/pytree": "pytree functions and dispatch modes, which have no public name in torch 2.11",
}
# File and why it imports parts of the package in functions. Elsewhere that would hide who needs whom.
DEFERRED_ALLOWED = {
    "cli/calibrate": "as cli/plan",
    "cli/config": "as cli/plan",
    "cli/report/command": "as cli/plan",
    "cli/generate/command": "as cli/plan",
    "cli/doctor": "it must tell of a machine without torch",
    "cli/plan": "`--help` and a mistyped option do not wait for torch",
    "cli/plan_search": "as cli/plan",
    "cli/plan_page/command": "as cli/plan",
    "cli/train": "as cli/plan",
    "cli/demo/command": "as cli/plan",
    "cli/demo/layout": "as cli/plan",
    "cli/demo/training": "one rank writes the results, and every rank's start would wait for what writes them",
    "trainer/reading": "a recipe is read without torch, and a key that is none of its own asks the plugin",
    "lazy/context": "the file imports transformers, which a script that has not imported it does not need",
}
HEAVY = ("transformers", "datasets", "deepspeed", "xformers", "flash_attn", "triton")


class Import(NamedTuple):
    """`module` is absolute and includes the imported name ("torch.nn.Linear"), since that may be a module too.

    deferred    stands in a function, so importing the file does not import the module
    for_types   stands behind TYPE_CHECKING
    """

    file: str
    line: int
    module: str
    deferred: bool = False
    for_types: bool = False

    def __str__(self) -> str:
        return f"shardwright/{self.file}:{self.line} imports {self.module}"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def read_imports(path: Path) -> Iterator[Import]:
    """All imports of a file, also those inside functions and those for types only, which are dependencies of the
    reader.
    """
    file = path.relative_to(PACKAGE).as_posix()
    package = ["shardwright", *path.relative_to(PACKAGE).parts[:-1]]

    def of(node: ast.AST, deferred: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name, deferred, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{start}.{alias.name}" for alias in node.names]
            yield from (Import(file, node.lineno, name, deferred, for_types) for name in names)
        deferred |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for_types |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            yield from of(child, deferred, for_types)

    return of(tree_of(path), False, False)


def room(file: str) -> str:
    """Sub-package or top-level module that a file belongs to; "" for shardwright/__init__.py, which resolves names
    lazily.
    """
    first = Path(file).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def starts_with(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


ALL = [found for path in sources() for found in read_imports(path)]


def test_every_room_has_a_level() -> None:
    rooms = {room(path.relative_to(PACKAGE).as_posix()) for path in sources()} - {"", "testing"}
    assert rooms <= set(LEVELS), f"give a level to {sorted(rooms - set(LEVELS))} here and in docs/architecture.md"


def test_imports_go_down_the_levels() -> None:
    wrong = []
    for found in ALL:
        here = room(found.file)
        if here in ("", "testing") or not starts_with(found.module, "shardwright"):
            continue
        there = found.module.removeprefix("shardwright").removeprefix(".").split(".")[0]
        # "testing" has its own test; a bare `import shardwright` is resolved lazily
        if there == here or there not in LEVELS:
            continue
        if LEVELS[there] > LEVELS[here] or (here in STRANGERS and there in STRANGERS):
            wrong.append(f"{found} (level {LEVELS[here]} -> {LEVELS[there]})")
    assert not wrong, "\n".join(wrong)


def test_imports_of_the_package_stand_at_the_top() -> None:
    wrong = [
        str(found)
        for found in ALL
        if found.deferred and starts_with(found.module, "shardwright") and not is_allowed(found.file, DEFERRED_ALLOWED)
    ]
    assert not wrong, "\n".join(wrong)


def is_allowed(file: str, allowed: Iterable[str]) -> bool:
    return file.removesuffix(".py") in allowed


def import_graph(imports: Iterable[Import]) -> dict[str, set[str]]:
    """Module of the package -> those that importing it imports first; a package is its __init__."""
    names = {path: path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in sources()}
    modules = {name.removesuffix(".__init__") for name in names.values()}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for found in imports:
        if found.deferred or found.for_types or not starts_with(found.module, "shardwright"):
            continue
        here = names[PACKAGE / found.file].removesuffix(".__init__")
        there = found.module
        while there not in modules:  # a name in a module
            there = there.rpartition(".")[0]
        graph[here] |= {there} - {here}
        while there := there.rpartition(".")[0]:
            if not starts_with(here, there):  # its own packages are there already
                graph[here].add(there)
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module, by Tarjan's algorithm."""
    found: list[list[str]] = []
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in graph[module]:
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            place = stack.index(module)
            component = stack[place:]
            del stack[place:]
            if len(component) > 1:
                found.append(sorted(component))

    for module in graph:
        if module not in number:
            visit(module)
    return sorted(found)


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}) == [
        ["a", "b", "c"],
        ["d", "e"],
    ]
    wrong = circles(import_graph(ALL))
    assert not wrong, "\n".join(" - ".join(circle) for circle in wrong)


def test_a_bare_import_of_the_package_is_only_in_the_command_line() -> None:
    """Its names lead to every level, so importing it from below would hide an upward import."""
    names = ("shardwright", "shardwright.launch", "shardwright.launch_from_torch", "shardwright.Booster")
    wrong = [str(found) for found in ALL if found.module in names and room(found.file) not in ("", "cli", "testing")]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_testing() -> None:
    wrong = [
        str(found)
        for found in ALL
        if starts_with(found.module, "shardwright.testing") and room(found.file) != "testing"
    ]
    assert not wrong, "\n".join(wrong)


def test_transformers_is_imported_only_where_models_are_handled() -> None:
    wrong = [
        str(found)
        for found in ALL
        if starts_with(found.module, "transformers") and not found.file.startswith(TRANSFORMERS_ALLOWED)
    ]
    assert not wrong, "\n".join(wrong)


def is_private(dotted: str) -> bool:
    """Whether a name of torch has a private part.

    Names below torch.ops are operators, whose underscores say nothing about stability; torch._foreach_* is in torch's
    reference.
    """
    parts = dotted.split(".")
    if parts[:2] == ["torch", "ops"] or dotted.startswith("torch._foreach_"):
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def torch_names(path: Path) -> Iterator[Import]:
    """Every name of torch that a file uses, by import or as an attribute of an import: `dist._x` is
    torch.distributed._x.
    """
    file = path.relative_to(PACKAGE).as_posix()
    tree = tree_of(path)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    yield from (found for found in read_imports(path) if starts_with(found.module, "torch"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        parts, value = [node.attr], node.value
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name) and starts_with(aliases.get(value.id, ""), "torch"):
            yield Import(file, node.lineno, ".".join([aliases[value.id], *reversed(parts)]))


@functools.cache
def all_torch_names() -> list[Import]:
    return [found for path in sources() for found in torch_names(path)]


def test_private_names_of_torch_are_kept_in_few_files() -> None:
    wrong = {
        str(found)
        for found in all_torch_names()
        if is_private(found.module) and not found.file.startswith(tuple(PRIVATE_TORCH_ALLOWED))
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_no_allowance_outlives_its_use() -> None:
    """A list of exceptions that nobody needs any more hides the next one."""
    importing = {found.file for found in ALL if starts_with(found.module, "transformers")}
    private = {found.file for found in all_torch_names() if is_private(found.module)}
    unused = [entry for entry in TRANSFORMERS_ALLOWED if not any(file.startswith(entry) for file in importing)]
    deferring = {found.file for found in ALL if found.deferred and starts_with(found.module, "shardwright")}
    unused += [entry for entry in DEFERRED_ALLOWED if not any(is_allowed(file, [entry]) for file in deferring)]
    unused += [entry for entry in PRIVATE_TORCH_ALLOWED if not any(file.startswith(entry) for file in private)]
    unused += [
        name for name in LEVELS if name not in {room(path.relative_to(PACKAGE).as_posix()) for path in sources()}
    ]
    assert not unused, f"take these out: {unused}"


def test_imports_inside_the_package_are_relative() -> None:
    """So that a room can be moved, and that its dialect is one."""
    absolute = [
        f"shardwright/{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and not node.level and starts_with(node.module or "", "shardwright")
    ]
    assert not absolute, "\n".join(absolute)


def test_nothing_unpickles() -> None:
    """Only the rank processes of tests and the processes of a search do, what their own parent or child wrote."""
    modules = ("pickle", "cloudpickle", "dill", "shelve")
    of_children = ("plugins/hybrid/found_layout.py", "planner/beside.py")
    users = [found for found in ALL if found.module.split(".")[0] in modules]
    wrong = [str(found) for found in users if room(found.file) != "testing" and found.file not in of_children]
    wrong += [str(found) for found in all_torch_names() if found.module == "torch.load"]
    assert not wrong, "\n".join(wrong)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"""
import json, sys
import torch
before = set(sys.modules)
import shardwright
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules and name not in before]))
"""
    assert json.loads(run_python(code)) == []


def test_a_plugin_loads_nothing_that_only_others_need() -> None:
    code = """
import sys
import shardwright
from shardwright import Booster
from shardwright.plugins import TorchDDPPlugin
shardwright.launch_from_torch()
Booster(plugin=TorchDDPPlugin())
Booster(plugin="torch_ddp")
loaded = {name for name in sys.modules if name.startswith("shardwright.")}
for name in ("pipeline.stage", "pipeline.executor", "shardformer.sharder", "zero.optimizer", "plugins.hybrid.plugin"):
    assert f"shardwright.{name}" not in loaded, name
"""
    run_python(code)


def test_names_are_resolved_when_first_used() -> None:
    code = """
import shardwright
names = ("launch_from_torch", "Booster", "plugins")
assert set(names) <= set(dir(shardwright)) and not set(names) & set(vars(shardwright))
for name in names:
    assert getattr(shardwright, name) is vars(shardwright)[name]
"""
    run_python(code)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import shardwright

    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        shardwright.no_such_name  # noqa: B018


def test_importing_the_package_is_fast() -> None:
    """What it adds to `import torch`; the best of three runs, because machines are busy with other things."""
    code = "import torch, time; start = time.perf_counter(); import shardwright; print(time.perf_counter() - start)"
    added = min(float(run_python(code)) for _ in range(3))
    assert added < 1.5, f"import shardwright adds {added:.2f} s to import torch"
