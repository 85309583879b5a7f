"""What `module_policy` of a policy says about a class of modules."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from ...utils.arguments import ExplainedArguments
from ..layer.parallel_module import own_arguments


@dataclass
class SubModuleReplacementDescription(metaclass=ExplainedArguments):
    """A child module to be sharded in place of the original.

    suffix                  name of the child below the described module ("mlp.dense_1", "layers[0].mlp")
    target_module           class with `from_native_module(module, process_group, **kwargs)`, such as those of
                            `shardformer.layer`
    kwargs                  handed to it
    ignore_if_not_exist     whether the child may be missing
    """

    suffix: str
    target_module: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    ignore_if_not_exist: bool = False

    def __post_init__(self) -> None:
        self.kwargs = {} if self.kwargs is None else self.kwargs
        if not isinstance(self.suffix, str) or not self.suffix:
            raise ValueError(f"suffix={self.suffix!r} must be the name of a child module, such as 'mlp.dense_1'")
        if not callable(getattr(self.target_module, "from_native_module", None)):
            raise ValueError(
                f"target_module={self.target_module!r} of {self.suffix!r} has no from_native_module; use a layer of "
                "shardformer.layer, the class itself, or one of your own with from_native_module(module, process_group)"
            )
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(name, str) for name in self.kwargs):
            raise ValueError(f"kwargs={self.kwargs!r} of {self.suffix!r} must be a dict of arguments by name, or None")
        if not isinstance(self.ignore_if_not_exist, bool):
            raise ValueError(
                f"ignore_if_not_exist={self.ignore_if_not_exist!r} of {self.suffix!r} must be True or False"
            )


@dataclass
class ModulePolicyDescription(metaclass=ExplainedArguments):
    """What changes in every module of one class.

    attribute_replacement   name -> value (dotted names reach into attributes)
    param_replacement       functions that are called with the module, and with the process group if they take two
                            arguments, and change the module's parameters
    sub_module_replacement  children to be sharded
    method_replacement      name -> function that takes the place of the class' method; `functools.partial` objects get
                            the module too

    None in a field means that nothing of that kind changes.
    """

    attribute_replacement: dict[str, Any] = field(default_factory=dict)
    param_replacement: list[Callable[..., None]] = field(default_factory=list)
    sub_module_replacement: list[SubModuleReplacementDescription] = field(default_factory=list)
    method_replacement: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """ValueError for a field of a wrong type. Policies change descriptions after they were made, too."""
        for name, made in (("attribute", dict), ("param", list), ("sub_module", list), ("method", dict)):
            if getattr(self, f"{name}_replacement") is None:
                setattr(self, f"{name}_replacement", made())
        for name, what in (("attribute", "values"), ("method", "functions")):
            value = getattr(self, f"{name}_replacement")
            if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
                raise ValueError(f"{name}_replacement={value!r} must be a dict from names to {what}, or None")
        for name, method in self.method_replacement.items():
            if not callable(method):
                raise ValueError(f"method_replacement[{name!r}]={method!r} must be a function that takes the module")
        for name, is_one, what in (
            ("param", callable, "functions that take a module"),
            ("sub_module", _is_child, "SubModuleReplacementDescription"),
        ):
            value = getattr(self, f"{name}_replacement")
            if not isinstance(value, list | tuple) or not all(map(is_one, value)):
                meant = "; put it in a list" if is_one(value) else ""
                raise ValueError(f"{name}_replacement={value!r} must be a list of {what}, or None{meant}")

    def bound(self, group: dist.ProcessGroup) -> ModulePolicyDescription:
        """The same in the one form that is applied: functions that take a module alone, methods, arguments that the
        layers know.
        """
        self.check()
        return ModulePolicyDescription(
            self.attribute_replacement,
            [_with_group(function, group) for function in self.param_replacement],
            [
                replace(child, kwargs=own_arguments(child.target_module, child.kwargs))
                for child in self.sub_module_replacement
            ],
            {name: _as_method(function) for name, function in self.method_replacement.items()},
        )


def _is_child(value: Any) -> bool:
    return isinstance(value, SubModuleReplacementDescription)


def _with_group(function: Callable[..., None], group: dist.ProcessGroup) -> Callable[..., None]:
    """`function`, a param_replacement, of a module alone."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some that are written in C
        return function
    for arguments in ((), (group,)):
        try:
            signature.bind(None, *arguments)
        except TypeError:
            continue
        return functools.wraps(function)(lambda module, arguments=arguments: function(module, *arguments))
    raise ValueError(f"param_replacement: {function!r} must be a function of a module, or of a module and a group")


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as something that a class binds to its instances: objects that are called, such as
    `functools.partial` and methods of the policy, are not.
    """
    if isinstance(function, types.FunctionType):
        return function

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method
