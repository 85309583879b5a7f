"""Apply a policy to a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn

from shardwright.shardformer.adapters import native_model
from shardwright.shardformer.config import ShardConfig
from shardwright.shardformer.init import LazyWeights
from shardwright.shardformer.layer.embedding import LogitsParallel
from shardwright.shardformer.layer.norm import fuse_norms, has_fusable_norms
from shardwright.shardformer.layer.parallel_module import ParallelGroup, native_class
from shardwright.shardformer.model import GeneratingModel, ShardedModel
from shardwright.shardformer.plan import Decision, Plan
from shardwright.shardformer.policies.auto import get_autopolicy
from shardwright.shardformer.policies.base import ModulePolicyDescription, Policy, SubModuleReplacementDescription, require_policy
from shardwright.shardformer.rng import make_sharded_region, synchronize_rng, uses_dropout
from shardwright.shardformer.styles import Column, PartialSum, Row
from shardwright.spec import ParamSpec, get_spec, set_spec

_LOGGER = logging.getLogger(__name__)


class ModelSharder:
    """Shards one model in place, as its policy says.

    Everything that can be wrong with plan and settings is found before the model is touched and before any communication,
    on every rank alike.
    """

    def __init__(self, model: nn.Module, policy: Policy | None, shard_config: ShardConfig) -> None:
        require_policy(policy)
        self.model = model
        self.shard_config = shard_config
        self._native = native_model(model)  # what the policy knows about; inside of `model` when that carries adapters
        self.policy = policy if policy is not None else get_autopolicy(self._native)
        self._decisions: list[Decision] | None = None

    def layer_lists(self, pipeline: bool) -> list[str] | None:
        """Names of the ModuleLists that the policy wants the model cut along; None leaves finding them to the pipeline."""
        if pipeline:
            self.policy.check_pipeline()
        self.policy.set_model(self._native)
        return self.policy.layer_lists_in(self.model)

    def kernels(self) -> str:
        """Which fused kernels the settings bring to this model, in words; empty where there are none."""
        found = []
        if _wants_sdpa(self._native, self.shard_config):
            already = getattr(getattr(self._native, "config", None), "_attn_implementation", None) == "sdpa"
            found.append("attention sdpa" + " (which it had by itself)" * already)
        if _wants_fused_norms(self.shard_config) and has_fusable_norms(self._native):
            found.append("RMS norms fused")
        return ", ".join(found)

    def prepare(self) -> list[Decision]:
        """Check settings and plan, and say what `shard` will do to the parameters; no parameter is touched yet."""
        if self._decisions is None:
            policy, config = self.policy, self.shard_config
            _check_supported(config)
            policy.set_model(self._native)
            policy.set_shard_config(config)
            policy.config_sanity_check()
            self._take(policy.prepared_model())
            policy.set_model(self._native)
            _check_optimizations(self._native, config)
            is_sharded = config.enable_tensor_parallelism and config.parallel.size > 1
            self._decisions = policy.whole_plan().decide(self._native, config.parallel) if is_sharded else []
        return self._decisions

    def shard(self, materialize: bool = True) -> list[dict[int, torch.Tensor]]:
        """Returns the parameters that pipeline stages share (see `Policy.get_shared_params`).

        materialize     give a model that was built in a `LazyInitContext` this rank's weights; a pipeline first releases what other
                        stages hold and then calls `LazyWeights.materialize` itself
        """
        policy, config = self.policy, self.shard_config
        weights = LazyWeights.of(self.model)
        decisions = self.prepare()
        shared = policy.get_shared_params()
        if decisions:
            _apply(self._native, decisions, config.parallel)
            if self.model is not self._native:  # the call that reaches the loss starts at the wrapper
                _adopt_root(self.model, config.parallel)
        self._replace_modules(policy.replacements())
        _use_optimizations(self._native, config)
        self._take(policy.finished_model())
        _describe_parameters(self.model)
        if materialize and weights is not None:
            weights.materialize(self.model, config.parallel.rank if config.enable_tensor_parallelism else 0)
        return shared

    def _take(self, native: nn.Module) -> None:
        """Go on with what the policy made of the model."""
        if self.model is self._native:
            self.model = native
        elif native is not self._native:
            raise ValueError(f"{type(self.policy).__name__} replaces the model itself, which it cannot once the model carries adapters")
        self._native = native

    def _replace_modules(self, descriptions: Mapping[type[nn.Module] | str, ModulePolicyDescription]) -> None:
        matches: dict[type[nn.Module] | str, list[tuple[str, nn.Module]]] = {key: [] for key in descriptions}
        for name, module in list(self._native.named_modules()):
            for key, found in matches.items():
                if native_class(module) is key or native_class(module).__name__ == key:
                    found.append((name, module))
        source = type(self.policy).__name__
        for key, found in matches.items():
            if not found:
                shown = key if isinstance(key, str) else key.__name__
                raise ValueError(
                    f"{source}.module_policy describes {shown}, but {type(self._native).__name__} has no such module; remove it"
                )
        for key, description in descriptions.items():
            for name, module in matches[key]:
                self._replace(name, module, description, source)

    def _replace(self, name: str, module: nn.Module, description: ModulePolicyDescription, source: str) -> None:
        for attribute, value in description.attribute_replacement.items():
            owner, _, last = attribute.rpartition(".")
            holder: Any = module
            for part in owner.split(".") if owner else ():
                holder = getattr(holder, part)
            setattr(holder, last, value)
        for replace in description.param_replacement:
            replace(module)
        for child in description.sub_module_replacement:
            self._replace_child(name, module, child, source)
        if description.method_replacement:
            # On a subclass rather than on the instance: activation checkpointing and `super()` go through the class.
            native = type(module)
            methods = {**description.method_replacement, "__module__": native.__module__, "native_class": native_class(module)}
            module.__class__ = type(native.__name__, (native,), methods)

    def _replace_child(self, name: str, module: nn.Module, child: SubModuleReplacementDescription, source: str) -> None:
        suffix = re.sub(r"\[(\d+)\]", r".\1", child.suffix)
        try:
            native = module.get_submodule(suffix)
        except AttributeError:
            if child.ignore_if_not_exist:
                return
            raise ValueError(
                f"{source}: {name or type(module).__name__} has no sub-module {child.suffix!r}; "
                "correct the suffix or set ignore_if_not_exist=True"
            ) from None
        if not hasattr(child.target_module, "from_native_module"):
            raise ValueError(
                f"{source}: target_module {child.target_module!r} of {child.suffix!r} has no from_native_module; "
                "use a layer of shardformer.layer"
            )
        group = self.shard_config.parallel.group
        parent, _, last = suffix.rpartition(".")
        try:
            target = child.target_module.from_native_module(native, group, **child.kwargs)
        except ValueError as error:
            raise ValueError(f"{source}: {name}.{child.suffix} ({type(native).__name__}): {error}") from None
        setattr(module.get_submodule(parent), last, target)


def apply_plan(model: nn.Module, plan: Plan, parallel: ParallelGroup) -> None:
    """Shard `model` in place; raises ValueError, with the model untouched, when the plan does not fit it."""
    _apply(model, plan.decide(model, parallel), parallel)


def _apply(model: nn.Module, decisions: Sequence[Decision], parallel: ParallelGroup) -> None:
    for decision in decisions:
        decision.style.convert(decision.site, decision.specs)
    _divide_dropout(decisions, parallel)
    _adopt_root(model, parallel)


def _adopt_root(model: nn.Module, parallel: ParallelGroup) -> None:
    if any(isinstance(module, LogitsParallel) for module in model.modules()):
        (GeneratingModel if hasattr(model, "generate") else ShardedModel).adopt(model, parallel)


def _divide_dropout(decisions: Sequence[Decision], parallel: ParallelGroup) -> None:
    """Dropout between a column and a row linear draws per rank, all other draws the same on every rank."""
    opens: dict[nn.Module, list[nn.Module]] = {}
    closes: dict[nn.Module, list[nn.Module]] = {}
    for decision in decisions:
        site, style = decision.site, decision.style
        if isinstance(style, Column) and not style.gather_output:
            opens.setdefault(site.parent, []).append(site.module)
        elif isinstance(style, Row):
            closes.setdefault(site.parent, []).append(site.module)
        elif isinstance(style, PartialSum) and uses_dropout(site.module):
            make_sharded_region(site.module, parallel.group)
    for parent, columns in opens.items():
        if uses_dropout(parent):
            make_sharded_region(parent, parallel.group, columns, closes.get(parent, ()))
    synchronize_rng(parallel.group)


def _describe_parameters(model: nn.Module) -> None:
    """Every parameter gets a spec under its full name, those that nothing touched too."""
    for name, param in model.named_parameters():
        spec = get_spec(param)
        if spec is None:
            set_spec(param, ParamSpec(name, tuple(param.shape)))
        elif spec.name != name:
            set_spec(param, spec.renamed(name))


def _check_supported(config: ShardConfig) -> None:
    if config.enable_sequence_parallelism:
        raise ValueError(
            "enable_sequence_parallelism=True: sequences are cut by HybridParallelPlugin, not by ShardFormer alone; use the plugin or False"
        )
    if config.gradient_checkpoint_config is not None:
        raise ValueError(
            "gradient_checkpoint_config: which layers recompute is decided per pipeline stage by HybridParallelPlugin; "
            "use the plugin, or model.gradient_checkpointing_enable()"
        )
    if config.pipeline_stage_manager is not None:
        raise ValueError("pipeline_stage_manager: ShardFormer alone cuts no stages; use HybridParallelPlugin(pp_size=...), or leave it out")
    if config.enable_jit_fused:
        raise ValueError("enable_jit_fused=True: no operation of this version has a just-in-time fused form; use torch.compile or False")
    if config.fp8_communication:
        raise ValueError("fp8_communication=True: collectives of tensor parallelism run in the dtype of the activations; use False")


def _check_optimizations(model: nn.Module, config: ShardConfig) -> None:
    if config.enable_flash_attention and not _has_sdpa(model):
        raise ValueError(f"enable_flash_attention=True: {type(model).__name__} has no fused attention in transformers; use False")
    if config.enable_fused_normalization and not config.enable_all_optimization and not has_fusable_norms(model):
        _LOGGER.warning(f"enable_fused_normalization=True: the norms of {type(model).__name__} are one kernel each already, and stay")


def _use_optimizations(model: nn.Module, config: ShardConfig) -> None:
    if _wants_sdpa(model, config):
        model.set_attn_implementation("sdpa")  # type: ignore[operator]
    if _wants_fused_norms(config):
        fuse_norms(model)


def _wants_sdpa(model: nn.Module, config: ShardConfig) -> bool:
    """Asked for all optimizations, a model keeps kernels that were chosen for it already."""
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    all_of_them = config.enable_all_optimization and chosen in (None, "eager", "sdpa")
    return (config.enable_flash_attention or all_of_them) and _has_sdpa(model)


def _wants_fused_norms(config: ShardConfig) -> bool:
    return config.enable_fused_normalization or config.enable_all_optimization


def _has_sdpa(model: nn.Module) -> bool:
    return bool(getattr(model, "_supports_sdpa", False)) and hasattr(model, "set_attn_implementation")
