"""What a policy says about a model, and the policy that says nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from shardwright.shardformer.config import ShardConfig
from shardwright.shardformer.layer.linear import is_linear
from shardwright.shardformer.plan import Plan
from shardwright.shardformer.styles import Style, VocabEmbedding, VocabHead


@dataclass
class SubModuleReplacementDescription:
    """A child module to be sharded in place of the original.

    suffix                  name of the child below the described module ("mlp.dense_1", "layers[0].mlp")
    target_module           class with `from_native_module(module, process_group, **kwargs)`, such as those of `shardformer.layer`
    kwargs                  handed to it
    ignore_if_not_exist     whether the child may be missing
    """

    suffix: str
    target_module: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    ignore_if_not_exist: bool = False


@dataclass
class ModulePolicyDescription:
    """What changes in every module of one class.

    attribute_replacement   name -> value (dotted names reach into attributes)
    param_replacement       functions that are called with the module and change its parameters
    sub_module_replacement  children to be sharded
    method_replacement      name -> function that takes the place of the class' method
    """

    attribute_replacement: dict[str, Any] = field(default_factory=dict)
    param_replacement: list[Callable[[nn.Module], None]] = field(default_factory=list)
    sub_module_replacement: list[SubModuleReplacementDescription] = field(default_factory=list)
    method_replacement: dict[str, Callable[..., Any]] = field(default_factory=dict)


class Policy:
    """How one family of models is sharded.

    Write `rules` (a plan relative to the base model) for a transformers model, `plan` for any other, `module_policy` to
    replace children class by class; all three may be combined. The other methods have defaults that do nothing.

    layer_lists     names of the ModuleLists that a pipeline cuts along, in the order in which they run, relative to the base model like
                    `rules`; for models whose layers are not found by themselves
    """

    model: nn.Module
    shard_config: ShardConfig
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
        """Modules that this rank keeps: all of them. Stages follow from the model itself; a policy with its own word on them is refused."""
        return list(self.model.children())

    def get_shared_params(self) -> list[dict[int, torch.Tensor]]:
        """What `ShardFormer.optimize` returns as shared parameters. Those that stages share are found by the pipeline."""
        return []

    @property
    def acts_without_sharding(self) -> bool:
        """Whether this policy does anything to a model whose layers are not sharded."""
        others = ("module_policy", "preprocess", "postprocess", "config_sanity_check")
        return self.layer_lists is not None or any(getattr(type(self), name) is not getattr(Policy, name) for name in others)

    def check_pipeline(self) -> None:
        """Refuse a policy that decides by hand what a pipeline finds out: it would be ignored."""
        instead = {
            "get_held_layers": "the layers of every stage follow from the model; remove it, name the lists of layers in layer_lists where "
            "they are not found, and say how many layers a stage has with num_layers_per_stage=",
            "get_shared_params": "parameters that stages share are found in the model; remove it",
        }
        for name, what in instead.items():
            if getattr(type(self), name) is not getattr(Policy, name):
                raise ValueError(f"{type(self).__name__}.{name} with pp_size above 1: {what}")

    def layer_lists_in(self, model: nn.Module) -> list[str] | None:
        """`layer_lists` by their names in `model`, which is the policy's model or holds it; None where the policy names none."""
        if self.layer_lists is None:
            return None
        if isinstance(self.layer_lists, str):
            raise ValueError(
                f"{type(self).__name__}.layer_lists={self.layer_lists!r} must be a list of names, such as [{self.layer_lists!r}]"
            )
        base = getattr(self.model, "base_model", self.model)
        prefix = next((f"{name}." if name else "" for name, module in model.named_modules() if module is base), self.base_prefix())
        return [f"{prefix}{name}" for name in self.layer_lists]

    def base_prefix(self) -> str:
        """Name of the base model inside the model, with a dot; empty when the model is the base model."""
        base = getattr(self.model, "base_model", self.model)
        name = next((name for name, module in self.model.named_modules() if module is base), "")
        return f"{name}." if name else ""

    def vocabulary_rules(self) -> dict[str, Style | str]:
        """Rules for the embeddings of the vocabulary and the head over it, as transformers names them."""
        multiple = self.shard_config.make_vocab_size_divisible_by
        embedding, head = _embeddings(self.model, "get_input_embeddings"), _embeddings(self.model, "get_output_embeddings")
        rules: dict[str, Style | str] = {}
        if not isinstance(embedding, nn.Embedding):
            return rules
        shardable = head is not None and is_linear(head)
        if head is not None and not shardable and getattr(head, "weight", None) is embedding.weight:
            return rules
        for name, module in self.model.named_modules(remove_duplicate=False):
            if isinstance(module, nn.Embedding) and module.weight is embedding.weight:
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
