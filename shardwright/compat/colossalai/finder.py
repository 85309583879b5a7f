"""Answers `import colossalai` and all imports below it from the table in `names`.

Modules are made when they are imported and look their names up when those are used, so that a script loads what it
needs of this package and no more. All of them are packages: python then asks this finder for names that a module does
not have (`from colossalai.booster import Missing` looks for a module of that name), and it answers with what to use.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ...utils.errors import nearest
from .missing import words_for
from .names import MODULES, Home

ROOT = "colossalai"
SHADOW = "SHARDWRIGHT_SHADOW_COLOSSALAI"  # 1: also in place of an installed Colossal-AI
_PACKAGE = __name__.rpartition(".")[0]


def install() -> None:
    """Once per process. ImportError where a real colossalai would be hidden by it."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if os.environ.get(SHADOW) != "1":
        _refuse_to_hide()
    elif ROOT in sys.modules:
        raise ImportError(
            f"{ROOT} was imported before {_PACKAGE}, which can only answer later imports: import it first"
        )
    sys.meta_path.insert(0, _Finder())


def _refuse_to_hide() -> None:
    found = sys.modules.get(ROOT) or importlib.util.find_spec(ROOT)
    if found is None:
        return
    file = getattr(found, "__file__", None) or getattr(found, "origin", None)
    raise ImportError(
        f"{_PACKAGE} would hide the colossalai in {file or 'a directory of that name on sys.path'}: uninstall that one "
        f"(or start elsewhere), or set {SHADOW}=1 to run scripts on shardwright all the same"
    )


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, self, origin=_PACKAGE, is_package=True)
        if fullname.partition(".")[0] != ROOT:
            return None
        parent, _, name = fullname.rpartition(".")
        # Without a name: python keeps quiet about a ModuleNotFoundError that names what it looked for.
        raise ImportError(f"{fullname} is not offered by {_PACKAGE}: {_instead(parent, name)}")

    def exec_module(self, module: ModuleType) -> None:
        here = module.__name__
        home = MODULES[here]
        listed = sorted(home) if isinstance(home, dict) else list(getattr(_import(home), "__all__", ()))

        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {here!r} has no attribute {name!r}")
            value = importlib.import_module(f"{here}.{name}") if f"{here}.{name}" in MODULES else _value(home, name)
            if value is _NOTHING:
                raise AttributeError(f"{here}.{name} is not offered by {_PACKAGE}: {_instead(here, name)}")
            setattr(module, name, value)
            return value

        module.__dict__.update(__getattr__=find, __all__=listed, __dir__=lambda: [*vars(module), *listed])
        if here == ROOT:
            module.__dict__["__version__"] = "0.5.0"  # the version whose names these are; scripts compare it


_NOTHING = object()


def _value(home: Home, name: str) -> Any:
    """What a module has under a name, or `_NOTHING`."""
    if isinstance(home, str):
        try:
            return getattr(_import(home), name, _NOTHING)
        except ImportError:  # names that people know and that are not there: see `_moved`
            return _NOTHING
    if name not in home:
        return _NOTHING
    module, _, attribute = home[name].partition(":")
    return getattr(_import(module), attribute)


def _import(module: str) -> ModuleType:
    return importlib.import_module(module, _PACKAGE)


def _instead(module: str, name: str) -> str:
    """What to use in place of a name that is not there."""
    said = words_for(f"{module}.{name}")
    if said is not None:
        return said
    if module not in MODULES:
        return f"there is no counterpart of {module}"
    home = MODULES[module]
    known = list(home) if isinstance(home, dict) else list(getattr(_import(home), "__all__", ()))
    known += [other.rpartition(".")[2] for other in MODULES if other.rpartition(".")[0] == module]
    listed = f"{module} has {', '.join(sorted(set(known)))}" if known else f"{module} has no such name"
    return listed + nearest(name, known)
