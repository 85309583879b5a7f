"""What a policy says about a model, and the policy that says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn

from ..config import ShardConfig
from ..layer.linear import is_linear
from ..plan import Plan
from ..styles import Style, VocabEmbedding, VocabHead
from .descriptions import ModulePolicyDescription, SubModuleReplacementDescription


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
            "in layer_lists where they are not found, and say how many layers a stage has with num_layers_per_stage=",
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
        embedding, head = (getattr(module, "weight", None) for module in _vocabulary(self.model))
        return embedding is not None and embedding is head

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
        embedding, head = _vocabulary(self.model)
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


def _vocabulary(model: nn.Module) -> Iterator[nn.Module | None]:
    """The embedding of the vocabulary and the head over it, as far as the model has them."""
    for method in ("get_input_embeddings", "get_output_embeddings"):
        try:
            yield getattr(model, method)()
        except (NotImplementedError, AttributeError):
            yield None


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
