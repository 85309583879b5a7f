"""Apply a policy to a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from ..lazy.weights import LazyWeights
from ..logging import get_dist_logger
from ..spec import ParamSpec, get_spec, set_spec
from .adapters import check_adapters, native_model, refuse_prefixes
from .apply import adopt_root, apply_decisions
from .attention import LocalHeads
from .attention_choice import Pick, pick_attention, use_attention
from .config import ShardConfig, require_config
from .dropouts import regions_for_dropout
from .fused import fuse_after_sharding, fuse_before_sharding, reasons_against, tell_of_none, words_of
from .lowering import Lowered, lower
from .plan import Plan
from .policies.auto import get_autopolicy
from .policies.base import Policy, require_policy
from .regions import Region, find_regions
from .sequence import AlongTensor, SequencePlan
from .sequence_check import verified
from .side_by_side import proven
from .styles import Decision
from .sum_at_exit import disproven


class ModelSharder:
    """Shards one model in place, as its policy says.

    Everything that can be wrong with plan and settings is found before the model is touched and before any
    communication, on every rank alike.

    dtype   that the model will compute in; None for that of its weights
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | None,
        shard_config: ShardConfig,
        sequence: AlongTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        sequence    how sequences are split over the ranks, if they are; what then calls the model sees to recomputed
                    layers and to stages (see `layer.sequence`)
        dtype       that the model will compute in; None: its own
        """
        require_policy(policy)
        require_config(shard_config)
        self.attention: list[Pick] = []
        self._dtype = dtype
        self.model = model
        self.shard_config = shard_config
        self.sequence = sequence
        self.split: SequencePlan | None = None
        self._native = native_model(model)  # what the policy knows about; inside of `model` when that carries adapters
        self.policy = policy if policy is not None else get_autopolicy(self._native)
        self._decisions: list[Decision] | None = None
        self._regions: list[Region] = []
        self._lowered = Lowered()
        self._plan = Plan({})
        self._attributes: list[tuple[Any, str, Any]] = []

    def layer_lists(self, pipeline: bool) -> list[str] | None:
        """Names of the ModuleLists that the policy wants the model cut along; None leaves finding them to the
        pipeline.
        """
        if pipeline:
            self.policy.check_pipeline()
        self.policy.set_model(self._native)
        return self.policy.layer_lists_in(self.model)

    def kernels(self) -> str:
        """Which fused kernels the settings bring to this model, in words; empty where there are none."""
        found = [str(pick) for pick in self.attention if pick.is_fused]
        return ", ".join(found + words_of(self._native, self.shard_config))

    def _tell_of_all(self) -> None:
        on = self.kernels() or f"nothing that {type(self._native).__name__} has not already"
        off = [] if any(pick.is_fused for pick in self.attention) else ["attention (stays as it was chosen)"]
        off += reasons_against(self._native)
        words = f"enable_all_optimization=True turned on: {on}; not turned on: {', '.join(off)}"
        get_dist_logger().info(words, ranks=[0])

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
            self.attention = pick_attention(self._native, config, self._dtype)
            tell_of_none(self._native, config)
            source = type(policy).__name__
            shards = config.enable_tensor_parallelism and config.parallel.size > 1
            ranks = config.parallel.size if shards else 1
            self._lowered = lower(self._native, policy.replacements(), source, ranks)
            if self._lowered.changes_parameters and LazyWeights.of(self.model) is not None:
                raise ValueError(
                    f"{source}.module_policy: param_replacement changes numbers, which a model that was built in a "
                    "LazyInitContext does not have yet; build it without one"
                )
            if shards:
                check_adapters(self._native)
                refuse_prefixes(self.model)
                self._plan = policy.whole_plan().extended(self._lowered.rules)
            else:
                self._plan = Plan(self._lowered.replacing, source)
            self._decisions = self._decide()
        return self._decisions

    def _decide(self) -> list[Decision]:
        decisions = self._plan.decide(self._native, self.shard_config.parallel, complete=False)
        regions = find_regions(self._native, decisions)
        self._plan.check(self._native, decisions, regions)
        self._regions = regions_for_dropout(self._native, decisions, regions, self._plan.source)
        if self.sequence is not None:
            lists = self.policy.layer_lists_in(self._native)
            self.split = verified(self._native, self._plan, decisions, regions, lists, self.shard_config, self.sequence)
            decisions = self.split.decisions(self._native, decisions)
        return decisions

    def shard(self, materialize: bool = True) -> list[dict[int, torch.Tensor]]:
        """Returns the parameters that pipeline stages share (see `Policy.get_shared_params`).

        materialize     give a model that was built in a `LazyInitContext` this rank's weights; a pipeline first
                        releases what other stages hold and then calls `LazyWeights.materialize` itself
        """
        policy, config = self.policy, self.shard_config
        weights = LazyWeights.of(self.model)
        decisions = self.prepare()
        shared = policy.get_shared_params()
        use_attention(self._native, self.attention)
        decisions = self._change(decisions)
        if config.enable_all_optimization:
            self._tell_of_all()
        fuse_before_sharding(self._native, config)
        drawing = None if self.split is None else self.split.for_dropout(self._regions)
        apply_decisions(self._native, decisions, self._regions, config.parallel, drawing)
        if self.split is not None and self.sequence is not None:
            self.split.apply(self._native, config.parallel, self.sequence)
        if self.model is not self._native:  # the call that reaches the loss starts at the wrapper
            adopt_root(self.model, config.parallel)
        for module, name, value in self._attributes:
            setattr(module, name, value)
        fuse_after_sharding(self._native, config)
        self._take(policy.finished_model())
        _describe_parameters(self.model)
        if materialize and weights is not None:
            weights.materialize(self.model, config.parallel.rank if config.enable_tensor_parallelism else 0)
        return shared

    def _change(self, decisions: list[Decision]) -> list[Decision]:
        """What a policy changes in whole modules; the decisions, which are others where shapes have changed, or where
        a module does not do any more what they were proven for.

        A rule that counts the heads of a module must see those that the model has, and what the policy says of them
        holds afterwards.
        """
        counted = {id(decision.site.module) for decision in decisions if isinstance(decision.style, LocalHeads)}
        before = self._lowered.attributes_of(counted)
        shapes = _shapes(self._native)
        self._lowered.change()
        self._attributes = self._lowered.attributes_of(counted)
        for module, name, value in before:
            setattr(module, name, value)
        wrong = disproven(decisions) if self._lowered.changes else set()
        if wrong:
            self._plan = self._plan.without(wrong)
        if wrong or _shapes(self._native) != shapes:
            decisions = self._decisions = self._decide()
        elif self._lowered.changes:
            decisions = self._decisions = proven(self._native, decisions)
        return decisions

    def _take(self, native: nn.Module) -> None:
        """Go on with what the policy made of the model."""
        if self.model is self._native:
            self.model = native
        elif native is not self._native:
            raise ValueError(
                f"{type(self.policy).__name__} replaces the model itself, which it cannot once the model "
                "carries adapters"
            )
        self._native = native


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters(remove_duplicate=False)}


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
            "enable_sequence_parallelism=True: sequences are cut by HybridParallelPlugin, not by ShardFormer alone; "
            "use the plugin or False"
        )
    if config.gradient_checkpoint_config is not None:
        raise ValueError(
            "gradient_checkpoint_config: which layers recompute is decided per pipeline stage by HybridParallelPlugin; "
            "use the plugin, or model.gradient_checkpointing_enable()"
        )
    if config.pipeline_stage_manager is not None:
        raise ValueError(
            "pipeline_stage_manager: ShardFormer alone cuts no stages; use "
            "HybridParallelPlugin(pp_size=...), or leave it out"
        )
