"""What a policy says about a model, and the policy that says nothing."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ...utils.arguments import ExplainedArguments
from ..config import ShardConfig
from ..layer.linear import is_linear
from ..layer.parallel_module import own_arguments
from ..plan import Plan
from ..styles import Style, VocabEmbedding, VocabHead


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
        for name, made in (("attribute", dict), ("param", list), ("sub_module", list), ("method", dict)):
            if getattr(self, f"{name}_replacement") is None:
                setattr(self, f"{name}_replacement", made())
        self.check()

    def check(self) -> None:
        """ValueError for a field of a wrong type. Policies change descriptions after they were made, too."""
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
    required = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return (lambda module: function(module, group)) if len(required) > 1 else function


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as something that a class binds to its instances: objects that are called, such as
    `functools.partial` and methods of the policy, are not.
    """
    if isinstance(function, types.FunctionType):
        return function

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


class Policy:
    """How one family of models is sharded.

    Write `rules` (a plan relative to the base model) for a transformers model, `plan` for any other, `module_policy` to
    replace children class by class; all three may be combined. The other methods have defaults that do nothing.

    layer_lists     names of the ModuleLists that a pipeline cuts along, in the order in which they run, relative to the
                    base model like `rules`; for models whose layers are not found by themselves
    """

    model: Any = None
    shard_config: Any = None
    layer_lists: Sequence[str] | None = None

    @property
    def config(self) -> Any:
        """The model's own config."""
        return self.model.config

    def set_model(self, model: nn.Module) -> None:
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config

    def config_sanity_check(self) -> None:
        """Raise ValueError for settings that this family cannot have."""

    def preprocess(self) -> nn.Module:
        """Change the model before it is sharded; returns it."""
        return self.model

    def rules(self) -> Mapping[str, Style | str]:
        """Pattern -> style, relative to the base model (`model.base_model` in transformers)."""
        return {}

    def plan(self) -> Plan:
        """The rules for this model, task head included."""
        prefix = self.base_prefix()
        rules = {f"{prefix}{pattern}": style for pattern, style in self.rules().items()}
        return Plan({**rules, **self.vocabulary_rules()}, type(self).__name__)

    def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        """Class, or name of a class -> what changes in its modules. Applied after the plan."""
        return {}

    def postprocess(self) -> nn.Module:
        """Change the model after it was sharded; returns it."""
        return self.model

    def get_held_layers(self) -> list[nn.Module]:
        """Modules that this rank keeps: all of them. Stages follow from the model itself; a policy with its own word
        on them is refused.
        """
        return list(self.model.children())

    def get_shared_params(self) -> list[dict[int, torch.Tensor]]:
        """What `ShardFormer.optimize` returns as shared parameters. Those that stages share are found by the
        pipeline.
        """
        return []

    @property
    def acts_without_sharding(self) -> bool:
        """Whether this policy does anything to a model whose layers are not sharded."""
        others = ("module_policy", "preprocess", "postprocess", "config_sanity_check")
        return self.layer_lists is not None or any(
            getattr(type(self), name) is not getattr(Policy, name) for name in others
        )

    def check_pipeline(self) -> None:
        """Refuse a policy that decides by hand what a pipeline finds out: it would be ignored."""
        instead = {
            "get_held_layers": "the layers of every stage follow from the model; remove it, name the lists of layers "
            "in layer_lists where "
            "they are not found, and say how many layers a stage has with num_layers_per_stage=",
            "get_shared_params": "parameters that stages share are found in the model; remove it",
        }
        for name, what in instead.items():
            if getattr(type(self), name) is not getattr(Policy, name):
                raise ValueError(f"{type(self).__name__}.{name} with pp_size above 1: {what}")

    def layer_lists_in(self, model: nn.Module) -> list[str] | None:
        """`layer_lists` by their names in `model`, which is the policy's model or holds it; None where the policy
        names none.
        """
        if self.layer_lists is None:
            return None
        if isinstance(self.layer_lists, str):
            raise ValueError(
                f"{type(self).__name__}.layer_lists={self.layer_lists!r} must be a list of names, such as "
                f"[{self.layer_lists!r}]"
            )
        base = getattr(self.model, "base_model", self.model)
        prefix = next(
            (f"{name}." if name else "" for name, module in model.named_modules() if module is base), self.base_prefix()
        )
        return [f"{prefix}{name}" for name in self.layer_lists]

    # --- what the sharder reads: the user's answers in one form, whatever they came as ---

    def prepared_model(self) -> nn.Module:
        """What `preprocess` returns; a method that returns nothing has changed the model in place."""
        return _or_model(self.preprocess(), self.model)

    def finished_model(self) -> nn.Module:
        """What `postprocess` returns, likewise."""
        return _or_model(self.postprocess(), self.model)

    def whole_plan(self) -> Plan:
        """What `plan` returns; a plain dict is one too."""
        plan: Any = self.plan()
        return Plan(plan, type(self).__name__) if isinstance(plan, Mapping) else plan

    def replacements(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        """What `module_policy` returns, as it is applied."""
        source = type(self).__name__
        bound = {}
        described = self.module_policy()
        if described is not None and not isinstance(described, Mapping):
            raise ValueError(
                f"{source}.module_policy returned {described!r}; it must return a dict from classes of modules, or "
                "their names, to ModulePolicyDescription"
            )
        for key, description in (described or {}).items():
            if not isinstance(key, str) and not (isinstance(key, type) and issubclass(key, nn.Module)):
                meant = f"; use its class, {type(key).__name__}" if isinstance(key, nn.Module) else ""
                raise ValueError(
                    f"{source}.module_policy: the key {key!r} must be a class of modules, or the name of one{meant}"
                )
            if not isinstance(description, ModulePolicyDescription):
                raise ValueError(
                    f"{source}.module_policy: {key!r} is described by {description!r}; it must be a "
                    "ModulePolicyDescription"
                )
            try:
                bound[key] = description.bound(self.shard_config.parallel.group)
            except ValueError as error:
                raise ValueError(
                    f"{source}.module_policy, {key if isinstance(key, str) else key.__name__}: {error}"
                ) from None
        return bound

    # --- for policies in the form of other frameworks ---

    @property
    def pipeline_stage_manager(self) -> None:
        """None: stages are cut by the pipeline, from the model itself."""
        return None

    def append_or_create_submodule_replacement(
        self,
        description: SubModuleReplacementDescription | list[SubModuleReplacementDescription],
        policy: dict[Any, ModulePolicyDescription],
        target_key: type[nn.Module] | str,
    ) -> dict[Any, ModulePolicyDescription]:
        """Add children to what `policy`, a `module_policy`, says about `target_key`; returns `policy`."""
        children = list(description) if isinstance(description, list | tuple) else [description]
        known = policy.setdefault(target_key, ModulePolicyDescription())
        known.sub_module_replacement = [*known.sub_module_replacement, *children]
        known.check()
        return policy

    def append_or_create_method_replacement(
        self,
        description: dict[str, Callable[..., Any]],
        policy: dict[Any, ModulePolicyDescription],
        target_key: type[nn.Module] | str,
    ) -> dict[Any, ModulePolicyDescription]:
        """Add methods to what `policy`, a `module_policy`, says about `target_key`; returns `policy`."""
        known = policy.setdefault(target_key, ModulePolicyDescription())
        known.method_replacement = {**known.method_replacement, **description}
        known.check()
        return policy

    def tie_weight_check(self) -> bool:
        """Whether the head over the vocabulary and its embedding are one parameter."""
        embedding, head = (
            _embeddings(self.model, "get_input_embeddings"),
            _embeddings(self.model, "get_output_embeddings"),
        )
        return (
            embedding is not None
            and head is not None
            and getattr(embedding, "weight", None) is getattr(head, "weight", None)
        )

    def base_prefix(self) -> str:
        """Name of the base model inside the model, with a dot; empty when the model is the base model."""
        base = getattr(self.model, "base_model", self.model)
        name = next((name for name, module in self.model.named_modules() if module is base), "")
        return f"{name}." if name else ""

    def vocabulary_rules(self) -> dict[str, Style | str]:
        """Rules for the embeddings of the vocabulary and the head over it, as transformers names them.

        Every embedding that is tied to one of the two goes with it: an encoder and a decoder may have one each, of
        which the head is tied to the other one than `get_input_embeddings` names.
        """
        multiple = self.shard_config.make_vocab_size_divisible_by
        embedding, head = (
            _embeddings(self.model, "get_input_embeddings"),
            _embeddings(self.model, "get_output_embeddings"),
        )
        rules: dict[str, Style | str] = {}
        if not isinstance(embedding, nn.Embedding):
            return rules
        shardable = head is not None and is_linear(head)
        if head is not None and not shardable and getattr(head, "weight", None) is embedding.weight:
            return rules
        weights = [embedding.weight, *([head.weight] if head is not None and shardable else [])]
        for name, module in self.model.named_modules(remove_duplicate=False):
            if isinstance(module, nn.Embedding) and any(module.weight is weight for weight in weights):
                rules[name] = VocabEmbedding(multiple)
            elif module is head and shardable:
                rules[name] = VocabHead(multiple, gather_output=not self.shard_config.parallel_output)
        return rules


def _embeddings(model: nn.Module, method: str) -> nn.Module | None:
    getter = getattr(model, method, None)
    try:
        return getter() if getter is not None else None
    except (NotImplementedError, AttributeError):
        return None


def _or_model(returned: nn.Module | None, model: nn.Module) -> nn.Module:
    return model if returned is None else returned


def require_policy(policy: Any) -> None:
    """Refuse what is no policy, with what was probably meant."""
    if policy is None or isinstance(policy, Policy):
        return
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise ValueError(f"policy={policy.__name__} is the class; pass an instance: {policy.__name__}()")
    if isinstance(policy, ShardConfig):
        raise ValueError(
            "policy=ShardConfig(...): the order is ModelSharder(model, policy, shard_config), with "
            "policy=None to find one"
        )
    raise ValueError(f"policy={policy!r} must be a shardformer Policy, or None to find one for the model")
