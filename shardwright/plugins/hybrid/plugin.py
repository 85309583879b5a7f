"""Tensor parallelism, pipelines, ZeRO and mixed precision in one plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.position import Position
from ...cluster.config import get_launch_config
from ...cluster.mesh import ParallelMesh, validate_sizes
from ...cluster.same_batch import SameBatch
from ...comm.quantised_wire import check_quantisable, quantised_group
from ...interface import OptimizerWrapper
from ...kernels.lazy_logits import Clock
from ...lazy.weights import LazyWeights, Materialization
from ...pipeline.checkpointing import PipelineGradientCheckpointConfig
from ...pipeline.cut.plan import CutModel, CutPlan
from ...pipeline.cut.tied import create_tied_process_groups
from ...pipeline.executor import PipelineExecutor
from ...pipeline.schedules import get_placement, splits_backward
from ...precision.fp8 import Fp8Options
from ...precision.policy import PrecisionPolicy
from ...shardformer.attention_choice import names_of
from ...shardformer.config import ShardConfig
from ...shardformer.deferring import let_weight_grads_wait
from ...shardformer.documents import DocumentProbe
from ...shardformer.fused import fused_operators
from ...shardformer.fused_head import heads_without_logits, let_losses_do_without_logits
from ...shardformer.model import split_heads
from ...shardformer.policies.auto import is_registered
from ...shardformer.rng import PlacedNumbers, uses_dropout
from ...shardformer.sharder import ModelSharder
from ...spec import EXPERT_AXES, ParamSpec, get_spec, set_spec
from ...utils.argument_types import check_arguments
from ...utils.device import chosen_as_for, get_current_device, move_model
from ...zero.lay_out import lay_out
from ...zero.layout import BUCKET_SIZE_IN_M
from ...zero.optimizer import ZeroOptimizer
from ...zero.unit_gatherer import UnitGatherer
from ..agreement import agree_on_arguments
from ..base import mesh_position, require_process_group
from ..data.input_limits import InputLimits
from ..fp8 import check_fp8, check_fp8_model, convert_where_wanted, follow_history, fp8_said
from ..settings import HybridSettings
from ..shared_buffers import SharedBuffers, share_all
from ..without_effect import HYBRID, Facts, find_without_effect, tell, warn_once
from ..zero_plugin import ZeroPlugin
from .adapters import adapter_homes, gather_adapters
from .chunks import ChunkGathering, ChunkReduction, chunks_gathered, prompt_of, prompt_parameters, sections_of
from .compiled import check_compiled, compile_where_wanted, compiled_words, require_compiler_where_wanted
from .config_form import read_config
from .experts import keep_own_experts, spread_experts
from .found_layout import search_layout
from .fused_loss import fused_loss_words
from .layer_axis import LayerFacts, draws_alike
from .layer_check import with_layers
from .model import HybridModel, OptimizerGroups, StageManager
from .preflight import BatchShape, Preflight, preflight
from .resolved import ResolvedLayout
from .room import lack_of_memory
from .sequence import check_sequence, probe_sequences, split_sequences
from .sequence_axis import SequenceFacts
from .sequence_loss import SequenceLoss
from .sequence_tensor import StageLengths, along_tensor, refuse_hidden_states, without_sequences


class HybridParallelPlugin(ZeroPlugin):
    """Shards layers over `tp_size` ranks, cuts the model into `pp_size` stages, and spreads the data over what is left.

    The arguments are documented where they live, in the groups that `shardwright.plugins.settings` deals them to:
    those of pipelines in `pipeline.settings`, of ZeRO in `zero.settings`, of the loss scale in `precision.scaler`.
    Bad ones raise a ValueError that names field, value, rule and what would work, on every rank and before anything is
    communicated.
    """

    argument_advice: ClassVar[Mapping[str, str]] = {
        "scheduler_nodes": 'leave it out: pp_style="zbv" plans itself',
        "stage": "it is called zero_stage",
        "dp_size": "leave it out: what the other sizes leave is data parallel",
        "use_ddp": "leave it out",
    }
    search_report: str | None = None  # what `from_search` found, beside what it uses

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int | None = None,
        precision: str = "bf16",
        zero_stage: int = 0,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_jit_fused: bool = False,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
        enable_sequence_overlap: bool = False,
        parallel_output: bool = True,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0,
        broadcast_buffers: bool = True,
        ddp_bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        zero_bucket_size_in_m: float = BUCKET_SIZE_IN_M,
        cpu_offload: bool = False,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        zero_group_size: int | None = None,
        custom_policy: Any = None,
        pp_style: str = "1f1b",
        num_model_chunks: int = 1,
        num_layers_per_stage: list[int] | None = None,
        overlap_p2p: bool = True,
        enable_metadata_cache: bool = True,
        deferred_bytes: int | None = None,
        gradient_checkpoint_config: PipelineGradientCheckpointConfig | None = None,
        make_vocab_size_divisible_by: int = 64,
        dp_outside: bool = True,
        inner_ring_size: int | None = None,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        example_inputs: Any = None,
        layer_costs: list[float] | None = None,
        auto_memory: float = 1.5,
        cut_memory: float | None = None,
        gather_ahead: int | None = None,
        offload_activations: float | list[float] | None = None,
        num_sequence_slices: int = 1,
        enable_fused_cross_entropy: bool = True,
        attention_backend: str | None = None,
        ep_size: int = 1,
        ulysses_size: int | None = None,
        enable_fused_activation: bool = False,
        enable_fused_rotary: bool = False,
        fp8_options: Fp8Options | Mapping[str, Any] | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(HybridParallelPlugin.__init__, arguments)
        self.settings = HybridSettings.deal(arguments)
        check_sequence(self.settings)
        check_compiled(self.settings)
        check_fp8(self.settings)
        require_process_group("HybridParallelPlugin")
        sizes: dict[str, Any] = {"pp": pp_size, "tp": tp_size, "sp": sp_size or 1, "ep": ep_size}
        validate_sizes(dist.get_world_size(), **sizes, dp=None, zero_group_size=zero_group_size)
        agree_on_arguments("HybridParallelPlugin", arguments)
        self.mesh = ParallelMesh(
            **sizes,
            dp_outside=dp_outside,
            ring_attention=self.settings.sequence_mode == "ring_attn",
            zero_group_size=zero_group_size,
        )
        # beside the exact ones, which everything else goes through
        quantised = quantised_group if fp8_communication else _as_it_is
        self._layer_group, self._message_group = quantised(self.tp_group), quantised(self.pp_group)
        self.policy = PrecisionPolicy(self.settings.precision.working)
        self.attention = ""
        self.layout: ResolvedLayout | None = None  # of the model boosted last; print it
        self._sequences: SequenceFacts | LayerFacts | None = None  # likewise
        known = pp_size > 1 and pp_style != "auto"  # boosting tells what the search chose
        placement = get_placement(pp_style if known else "1f1b", pp_size, num_model_chunks if known else 1)
        self.stage_manager = StageManager(placement, self.mesh.coordinate("pp"))
        sharing = self.mesh.size("zero")
        facts = Facts(
            precision,
            zero_stage,
            self.dp_size,
            pp_size,
            tp_size,
            sharing,
            self._postpones_weights,
            pp_style,
            self.settings.sharding.sharding_only(pp_size),
            enable_sequence_parallelism,
            self.mesh.size("sp"),
        )
        self.without_effect = find_without_effect(HybridParallelPlugin.__init__, arguments, HYBRID, facts)
        tell(self.without_effect)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None = None, **overrides: Any) -> HybridParallelPlugin:
        """The plugin that a configuration in dict form describes (see `plugins.hybrid.config_form`); by default the one
        given to `launch`.

        `overrides` are arguments of the plugin itself, for what the dict form cannot say.
        """
        flat, unused = read_config(get_launch_config() if config is None else config)
        flat.update(overrides)
        dp_size = flat.pop("dp_size", None)
        if dp_size not in (None, -1, "auto"):
            require_process_group("HybridParallelPlugin")
            sizes = {axis: flat.get(f"{axis}_size") or 1 for axis in ("pp", "tp", "sp")}
            left, _ = validate_sizes(dist.get_world_size(), **sizes, dp=None, zero_group_size=None)
            if dp_size != left:
                raise ValueError(
                    f"parallel.data={dp_size!r} does not fit: {dist.get_world_size()} ranks / (tensor {sizes['tp']} x "
                    f"pipeline {sizes['pp']}) leave {left} data-parallel ranks; use data={left} or leave it out"
                )
        plugin = cls(**flat)
        tell(unused)
        plugin.without_effect += unused
        return plugin

    @classmethod
    def from_search(
        cls,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        global_batch_size: int,
        sequence_length: int,
        gpu: str | None = None,
        gpu_memory: float | None = None,
        gpus_per_node: int | None = None,
        inside_bandwidth: float | None = None,
        between_bandwidth: float | None = None,
        precision: str = "bf16",
        calibration: str | None = None,
        **others: Any,
    ) -> HybridParallelPlugin:
        """The fastest layout that fits, as `shardwright plan --search` finds it; collective, after `launch`. `others`
        are arguments of the plugin that are not searched for; `search_report` says what was found.

        model, optimizer   not boosted yet; without an optimizer, AdamW is taken to come
        global_batch_size, sequence_length   samples of a step on all ranks, and tokens of one
        gpu      kind of device; None: this rank's own, with its memory
        gpu_memory and the others   GiB, devices, GB/s; None: what is published of `gpu`
        calibration   file of `shardwright calibrate`, in place of what is published; rank 0 reads it
        """
        asked = {name: value for name, value in locals().items() if name not in ("cls", "model", "optimizer", "others")}
        check_arguments(HybridParallelPlugin.from_search, asked)
        found, report = search_layout(model, optimizer, asked, others)
        plugin = cls(**found, **others)
        plugin.search_report = report
        return plugin

    # Where this rank is.

    @property
    def tp_size(self) -> int:
        return self.mesh.size("tp")

    @property
    def pp_size(self) -> int:
        return self.mesh.size("pp")

    @property
    def sp_size(self) -> int:
        return self.mesh.size("sp")

    @property
    def ep_size(self) -> int:
        return self.mesh.size("ep")

    @property
    def dp_size(self) -> int:
        return self.mesh.size("dp")

    @property
    def pg_mesh(self) -> ParallelMesh:
        return self.mesh

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.mesh.group("tp")

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.mesh.group("pp")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.mesh.group("dp")

    @property
    def sp_group(self) -> dist.ProcessGroup:
        return self.mesh.group("sp")

    @property
    def mixed_dp_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same parameters: data and sequence parallel."""
        return self.mesh.group("dp_sp")

    @property
    def zero_stage(self) -> int:
        return self.settings.zero.stage

    @property
    def precision(self) -> str:
        return self.settings.precision.precision

    @property
    def enable_pipeline_parallelism(self) -> bool:
        return self.pp_size > 1

    @property
    def split(self) -> str:
        sizes = {"tp_size": self.tp_size, "pp_size": self.pp_size, "ep_size": self.ep_size}
        parts = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        return ", ".join([*parts, "zero_stage=3"] if self.zero_stage == 3 else parts)

    @property
    def is_pipelined(self) -> bool:
        return self.pp_size > 1

    @property
    def data_parallel(self) -> tuple[int, int]:
        return self.dp_size, self.mesh.coordinate("dp")

    def position(self, model: nn.Module | None = None) -> Position:
        """Where this rank stands; `model` tells of which tied parameters it holds copies."""
        copies: set[str] = set()
        if isinstance(model, HybridModel):
            cut = model.cut
            copies = {group.names[0] for group in cut.tied_groups if cut.rank in group.ranks[1:]}
        return mesh_position(self.mesh, frozenset(copies))

    @property
    def _postpones_weights(self) -> bool:
        """Whether weight gradients can be computed apart from those of the inputs, by the schedule or by one that a
        search may choose.
        """
        style = self.settings.pipeline.pp_style
        return self.pp_size > 1 and (style == "auto" or splits_backward(style))

    def preflight(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        batch_size: int | None = None,
        sequence_length: int | None = None,
    ) -> ResolvedLayout:
        """What this layout comes to for a whole model, which is left as it is; ValueError when it does not fit.

        batch_size, sequence_length     of one data-parallel rank, for what depends on them
        """
        batch = BatchShape(batch_size, sequence_length)
        if sequence_length is not None:
            InputLimits(model).check_length(sequence_length)
            self.settings.pipeline.check_length(sequence_length)
        self._sequences = probe_sequences(self.settings, model)
        return self._preflight(model, optimizer, self._sharder(model), batch).layout

    def _preflight(
        self, model: nn.Module, optimizer: Optimizer | None, sharder: ModelSharder | None, batch: BatchShape
    ) -> Preflight:
        compiled = compiled_words(model, self.settings)
        found = preflight(model, optimizer, self.settings, self.mesh, self.policy, sharder, batch)
        loss = fused_loss_words(model, self.settings, self.mesh, batch, found.layout.num_microbatches)
        words = (found.layout.kernels, loss, compiled, fp8_said(self.settings.precision))
        kernels = ", ".join(filter(None, words))
        unused = tuple(map(str, self.without_effect))
        layout = with_layers(found.layout, model, self._sequences)
        return found._replace(layout=replace(layout, kernels=kernels, without_effect=unused))

    # Boosting: the order in which things are applied.

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[ModelSharder | None, Preflight]:
        self._sequences = probe_sequences(self.settings, model)
        require_compiler_where_wanted(self.settings)
        check_fp8_model(self.settings.precision, model)
        if self.settings.precision.fp8_communication and not self.policy.is_half:
            check_quantisable(model)
        sharder = self._sharder(model)
        found = self._preflight(model, optimizer, sharder, BatchShape())  # sees it whole
        self.layout = found.layout
        self.attention = names_of(sharder.attention) if sharder is not None else ""  # compared over the ranks
        self.stage_manager = StageManager(found.plan.placement, self.mesh.coordinate("pp"))
        return sharder, found

    def lay_out(
        self, model: nn.Module, optimizer: Optimizer | None, checked: tuple[ModelSharder | None, Preflight]
    ) -> tuple[nn.Module, OptimizerWrapper | None]:
        sharder, (plan, layout, job) = checked
        if self.mesh.rank == 0:
            for warning in (*layout.warnings, *lack_of_memory(layout, self.settings.zero.cpu_offload)):
                warn_once(warning)
            if self.settings.pipeline.offload_activations and chosen_as_for(get_current_device()) == "cpu":
                warn_once(
                    "offload_activations: what a CPU computes is in host memory anyway, so that it is copied and "
                    "nothing is saved"
                )
        probe = DocumentProbe(model)
        place = self._place() if uses_dropout(model) else None
        adapters = adapter_homes(model, plan)
        groups = OptimizerGroups(model, optimizer) if optimizer is not None else None
        weights = LazyWeights.of(model)
        spread_experts(model, self.mesh)
        if sharder is not None:  # every layer over tp
            sharder.shard(materialize=False)  # other stages' layers are never made
            model = sharder.model
        keep_own_experts(model, self.mesh)
        apart = self._postpones_weights and splits_backward(plan.pp_style)
        if apart:
            let_weight_grads_wait(model)
        convert_where_wanted(model, self.settings.precision)
        clock = Clock()
        if self.settings.sharding.enable_fused_cross_entropy:
            let_losses_do_without_logits(model, clock)
        compile_where_wanted(model, self.settings, apart)
        job = job.of_changed(model, self.policy)
        cut = plan.apply(model, self.mesh.coordinate("pp"))  # this rank's layers remain
        cut.staged.cast_released(job.dtypes)
        making = None
        if weights is not None:
            coordinates = {axis: self.mesh.coordinate(axis) for axis in ("tp", "sp", *EXPERT_AXES)}
            making = Materialization(weights, model, coordinates, get_current_device())
            making.make_replaced()
        if self.zero_stage < 3:  # else unit by unit
            if making is not None:
                making.make(list(model.parameters()))
            move_model(model, get_current_device())
        if groups is not None:
            groups.rebind(model)
        copies = [] if cut.loss_check is None else [cut.loss_check.model]
        sequence = split_sequences(self.settings, self.mesh, model, self._sequences, copies)
        if sequence is not None:
            cut.staged.handover = sequence.axis.handover(cut.staged.units)
        tied = self._describe_tied(model, plan)  # before the sections, which read it
        prompt = prompt_parameters(plan, model, cut.rank, self.settings, heads_without_logits(model))
        sections = sections_of(cut.staged, prompt) if self.pp_size > 1 else None
        wrapped, units = lay_out(
            model,
            optimizer,
            self.mesh,
            self.settings.zero,
            self.policy,
            self.settings.scaler,
            job=job,
            sections=sections,
            tied_groups=tied,
            launch_in_backward=self.pp_size == 1,
            make=None if making is None else making.make,
        )
        if making is not None:
            making.finish()
        if wrapped is not None:
            wrapped.optim.register_step_post_hook(clock.tick)
        follow_history(model, self.settings.precision, wrapped, self.mesh, "dp", "sp", "tp")
        share_all(model, self.mixed_dp_group)
        split = None if sharder is None else sharder.split
        refuse_hidden_states(model, split)
        numbers = StageLengths(
            PlacedNumbers(place, cut.staged.model), split if self.pp_size > 1 else None, self.tp_size
        )
        executor = self._executor(cut, wrapped, units, probe, numbers, sequence, sections)
        waits = self.mesh.size("tp", "sp", "ep") > 1 or (self.zero_stage == 3 and self.mesh.size("zero") > 1)
        boosted = HybridModel(
            model, executor, self.policy, wrapped, adapters, self._buffer_sharing(model, wrapped), waits, sequence
        )
        return boosted, wrapped

    def _sharder(self, model: nn.Module) -> ModelSharder | None:
        options = self.settings.sharding
        wanted = options.enable_flash_attention or options.attention_backend is not None or fused_operators(options)
        policy = options.policy_for(model, self.tp_size)
        acts = options.acting_policy is not None or (policy is not None and self.pp_size > 1) or is_registered(model)
        if self.tp_size == 1 and not wanted and not acts:
            return None  # any model will do, also one that no policy knows
        config = ShardConfig(
            tensor_parallel_process_group=self._layer_group,
            enable_tensor_parallelism=self.tp_size > 1,
            **{**options.shared(), **without_sequences()},
        )
        return ModelSharder(
            model,
            policy,
            config,
            along_tensor(self.settings),
            self.policy.dtype if self.policy.is_half else None,
        )

    def _describe_tied(self, model: nn.Module, plan: CutPlan) -> dict[str, dist.ProcessGroup]:
        """Note on every parameter that other stages hold too which group that is; returns the process group of each."""
        rank = self.mesh.coordinate("pp")
        groups = create_tied_process_groups(plan.tied_groups, rank, self.mesh.tied_group)
        params = dict(model.named_parameters(remove_duplicate=False))
        tied = {}
        for group in plan.tied_groups:
            if rank in group.ranks:
                name = group.names[0]
                param = params[name]
                spec = get_spec(param) or ParamSpec(name, tuple(param.shape))
                set_spec(param, replace(spec, tied=name))
                tied[name] = groups[group.ranks]
        return tied

    def _buffer_sharing(self, model: nn.Module, optimizer: OptimizerWrapper | None) -> Callable[[], None] | None:
        """What a training forward begins with: rank 0's buffers, as DistributedDataParallel does outside of no_sync.
        None: nothing.
        """
        buffers = SharedBuffers(model, self.mixed_dp_group)
        if optimizer is None or not self.settings.replicas.broadcast_buffers or not buffers.are_needed:
            return None

        def share() -> None:
            if optimizer.require_sync:
                buffers.share()

        return share

    def _place(self) -> int | None:
        """A number for the samples and layers of this rank; None where all ranks have the same."""
        axes = ("dp", "pp") if draws_alike(self._sequences) else ("dp", "pp", "sp")
        return self.mesh.coordinate(*axes) if self.mesh.size(*axes) > 1 else None

    def _executor(
        self,
        cut: CutModel,
        optimizer: ZeroOptimizer | None,
        units: UnitGatherer | None,
        probe: DocumentProbe,
        numbers: StageLengths,
        sequence: SequenceLoss | None,
        sections: Mapping[nn.Parameter, int] | None,
    ) -> PipelineExecutor:
        return PipelineExecutor(
            cut,
            self.settings.pipeline,
            pipe_group=self._message_group if self.pp_size > 1 else None,
            message_groups=self.mesh.message_groups(cut.placement.channels),
            loss_group=self.mixed_dp_group if self.mesh.size("dp_sp") > 1 else None,
            reduction=None if optimizer is None or sections is None else ChunkReduction(optimizer, prompt_of(sections)),
            grad_factor=float(self.dp_size * self.sp_size),  # the optimizer averages over these
            postpone_weights=self._postpones_weights,
            pairs=self.tp_size > 1,
            gathering=ChunkGathering(units) if units is not None and self.pp_size > 1 else None,
            gathered=chunks_gathered(self.settings.zero.gather_ahead),
            split_heads=split_heads(cut.staged.model),
            cast_inputs=self.policy.cast_inputs,
            keeps_documents_apart=probe,
            numbers=numbers,
            equal_numbers=(self.zero_stage >= 2 and self.dp_size > 1) or self.ep_size > 1,
            same_batch=SameBatch(self.mesh.ranks("pp", "tp", "sp"))
            if self.pp_size * self.tp_size * self.sp_size > 1
            else None,
            divide=None if sequence is None else sequence.divide_without_cache,
        )

    # Training.

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """As `Booster.execute_pipeline`; without a criterion the loss is the model's own."""
        if not isinstance(model, HybridModel):
            raise ValueError(f"execute_pipeline needs the model that boost returned, not a bare {type(model).__name__}")
        if optimizer is not None:
            optimizer.require_cleared()
        entered: AbstractContextManager[None] = nullcontext()
        if model.sequence is not None:
            model.sequence.require_own(criterion)
            entered = model.sequence.axis.entered()
        if model.share_buffers is not None and optimizer is not None:
            model.share_buffers()
        owner = optimizer.sharded if optimizer is not None and self.pp_size > 1 and torch.is_grad_enabled() else None
        trained = owner if isinstance(owner, ZeroOptimizer) else None
        if trained is not None:
            trained.reopen()
        with optimizer.plain_parameters() if optimizer is not None else nullcontext(), entered:
            result = model.executor.execute(data_iter, criterion, optimizer, return_loss, return_outputs)
        if trained is not None:
            trained.note_step()
        return result

    def adapter_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        if not isinstance(model, HybridModel):
            raise ValueError(
                f"save_lora_as_pretrained needs the model that boost returned, not a bare {type(model).__name__}"
            )
        return gather_adapters(model.unwrap(), model.adapters, self.mesh)


def _as_it_is(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return group
