"""How a model is cut and a batch is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..utils.errors import counted
from .checkpointing import PipelineGradientCheckpointConfig
from .schedules import get_placement


@dataclass(frozen=True)
class PipelineSettings:
    """How a model is cut and a batch is run.

    pp_style, num_model_chunks   schedule and stages per rank; "auto" searches for both (`search`)
    num_microbatches             microbatches of a batch (fewer for a batch with fewer samples)
    microbatch_size              or samples per microbatch; with neither a batch is one microbatch
    num_sequence_slices          parts into which every microbatch is cut along its sequence (causal decoders): less
                                 memory for long sequences, less bubble for few microbatches
    num_layers_per_stage         layers of each of the pp_size x num_model_chunks stages; None: balanced by cost
    gradient_checkpoint_config   which layers are recomputed; None: all of them if the model's own checkpointing is on,
                                 else none
    overlap_p2p                  receive while computing; the numbers are the same without
    enable_metadata_cache        describe a message only where its shapes do not follow from earlier ones; False:
                                 describe every message
    deferred_bytes               what weight gradients that "zb", "zbv" and "dualpipev" postpone may hold on a rank;
                                 None: what fits into the memory that 1F1B needs, 0: nothing is postponed
    offload_activations          share of the activations of every stage, 0 to 1, that waits in host memory between
                                 forward and backward, or one per stage (pp_size x num_model_chunks); None: none. Those
                                 that wait for fewer than three actions stay
    auto_memory                  activations that "auto" may hold, over those that 1f1b holds with layers dealt evenly
    cut_memory                   the same of a schedule named by hand: the cut makes the dearest rank as cheap as that
                                 allows; None: it follows time alone
    layer_costs                  time of every layer, forward and backward, in any unit, as measured; None: estimated
    """

    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    num_layers_per_stage: Sequence[int] | None = None
    gradient_checkpoint_config: PipelineGradientCheckpointConfig | None = None
    overlap_p2p: bool = True
    enable_metadata_cache: bool = True
    deferred_bytes: int | None = None
    layer_costs: Sequence[float] | None = None
    offload_activations: float | Sequence[float] | None = None
    auto_memory: float = 1.5
    cut_memory: float | None = None
    num_sequence_slices: int = 1

    def offloaded(self, num_stages: int) -> Sequence[float] | None:
        """`offload_activations` by stage; None where nothing leaves."""
        given = self.offload_activations
        shares = [float(given)] * num_stages if isinstance(given, int | float) else given
        return shares if shares is not None and any(shares) else None

    def check(self, pp_size: int) -> None:
        """Refuse what does not fit a pipeline of `pp_size` ranks."""
        for name in ("num_microbatches", "microbatch_size", "num_model_chunks", "num_sequence_slices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be a whole number of at least 1")
        if self.deferred_bytes is not None and self.deferred_bytes < 0:
            raise ValueError(
                f"deferred_bytes={self.deferred_bytes} must be at least 0 (nothing is postponed); None takes what fits "
                "into 1F1B's memory"
            )
        config = self.gradient_checkpoint_config
        if config is not None and not isinstance(config, PipelineGradientCheckpointConfig):
            raise ValueError(
                f"gradient_checkpoint_config={config!r} must be a PipelineGradientCheckpointConfig(...) or None"
            )
        if self.pp_style == "auto":
            self._check_search(pp_size)
        else:
            get_placement(self.pp_style, max(pp_size, 1), self.num_model_chunks)
        self._check_offload(pp_size)
        if self.num_sequence_slices > 1 and pp_size == 1:
            raise ValueError(
                f"num_sequence_slices={self.num_sequence_slices} with pp_size=1: slices of a sequence follow one "
                "another through a pipeline, and without one all of them would be held as the whole is; leave it out, "
                "or use pp_size of at least 2"
            )
        self._check_cut_memory(pp_size)
        if pp_size > 1 and self.num_microbatches is None and self.microbatch_size is None:
            raise ValueError(
                f"pp_size={pp_size} needs num_microbatches or microbatch_size: a pipeline works on parts of a batch; "
                f"num_microbatches={2 * pp_size} is a good start"
            )
        if self.num_microbatches is not None and self.microbatch_size is not None:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} and microbatch_size={self.microbatch_size} both say how a "
                "batch is split; give one of them"
            )

    def check_length(self, tokens: int) -> None:
        """Refuse more slices than a planned sample has tokens. Steps cut short batches into fewer (`SlicedInputs`)."""
        if self.num_sequence_slices > tokens:
            raise ValueError(
                f"num_sequence_slices={self.num_sequence_slices} with sequence_length={tokens}: a slice has one token "
                f"at least; use num_sequence_slices={tokens} or fewer"
            )

    def _check_offload(self, pp_size: int) -> None:
        given = self.offload_activations
        if given is None:
            return
        said = f"offload_activations={given}"
        shares = [given] if isinstance(given, int | float) else list(given)
        if any(not 0 <= share <= 1 for share in shares):
            raise ValueError(f"{said} must be a share from 0 (none) to 1 (all), or a list of shares")
        if pp_size == 1:
            raise ValueError(
                f"{said} with pp_size=1: without a pipeline every backward follows its forward at once, so that there "
                "is no time in which activations could be away; leave it out and let layers be recomputed "
                "(gradient_checkpoint_config)"
            )
        if isinstance(given, int | float):
            return
        if self.pp_style == "auto":
            raise ValueError(
                f"{said} with pp_style='auto', which chooses the number of stages: give one number for all of them"
            )
        stages = get_placement(self.pp_style, pp_size, self.num_model_chunks).num_stages
        if len(shares) != stages:
            raise ValueError(
                f"{said} has {counted(len(shares), 'entry', 'entries')} for {stages} stages (pp_size={pp_size} x "
                f"num_model_chunks={self.num_model_chunks}); give one per stage, or one number for all"
            )

    def _check_cut_memory(self, pp_size: int) -> None:
        given = self.cut_memory
        if given is None:
            return
        if not 0 < given < float("inf"):
            raise ValueError(
                f"cut_memory={given} must be above 0: it is the memory of activations over that of 1f1b with layers "
                "dealt evenly"
            )
        if self.pp_style == "auto":
            raise ValueError(
                f"cut_memory={given} with pp_style='auto', whose bound is auto_memory; "
                f"auto_memory={max(1, given)} works"
            )
        if self.num_layers_per_stage is not None:
            raise ValueError(
                f"cut_memory={given} with num_layers_per_stage={list(self.num_layers_per_stage)}: one chooses the cut "
                "and the other one is the cut; leave one of them out"
            )
        if self.num_microbatches is None and pp_size > 1:
            raise ValueError(
                f"cut_memory={given} needs num_microbatches, because what ranks hold depends on them; give it instead "
                "of microbatch_size"
            )

    def _check_search(self, pp_size: int) -> None:
        """Refuse what leaves nothing to search for, or nothing to search with."""
        if self.num_microbatches is None and pp_size > 1:
            raise ValueError(
                "pp_style='auto' needs num_microbatches, because how good a schedule is depends on them; "
                f"num_microbatches={4 * pp_size} is a good start"
            )
        if self.num_sequence_slices > 1:
            raise ValueError(
                f"num_sequence_slices={self.num_sequence_slices} with pp_style='auto', which searches among schedules "
                "of whole microbatches; name a schedule ('1f1b' and 'zb' hold least), or leave num_sequence_slices out"
            )
        for name, none in (("num_model_chunks", 1), ("num_layers_per_stage", None)):
            value = getattr(self, name)
            if value != none:
                raise ValueError(
                    f"{name}={value} with pp_style='auto', which chooses it; leave {name} out, or name a schedule"
                )
        config = self.gradient_checkpoint_config
        for name, ratio in (
            ("num_ckpt_layers_per_stage", "gradient_checkpointing_ratio"),
            ("num_selective_layers_per_stage", "selective_ratio"),
        ):
            numbers = getattr(config, name, None)
            if numbers is not None and len(numbers) != pp_size:
                raise ValueError(
                    f"{name}={list(numbers)} with pp_style='auto', which chooses the number of stages: give {pp_size} "
                    f"numbers, one per pipeline rank, or {ratio}"
                )
        if not self.auto_memory >= 1:
            raise ValueError(
                f"auto_memory={self.auto_memory} must be at least 1: it is the memory of activations over that of 1f1b"
            )
