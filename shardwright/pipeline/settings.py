"""How a model is cut and a batch is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .checkpointing import PipelineGradientCheckpointConfig


@dataclass(frozen=True)
class PipelineSettings:
    """How a model is cut and a batch is run.

    pp_style, num_model_chunks   schedule and stages per rank; "auto" searches for both (`search`)
    num_microbatches             microbatches of a batch (fewer for a batch with fewer samples)
    microbatch_size              or samples per microbatch; with neither a batch is one microbatch
    num_sequence_slices          parts into which every microbatch is cut along its sequence
    num_layers_per_stage         layers of each of the pp_size x num_model_chunks stages; None: balanced by cost
    gradient_checkpoint_config   which layers are recomputed; None: all of them if the model's own checkpointing is on,
                                 else none
    overlap_p2p                  receive while computing; the numbers are the same without
    enable_metadata_cache        describe a message only where its shapes do not follow from earlier ones; False:
                                 describe every message
    deferred_bytes               what weight gradients that a zero-bubble schedule postpones may hold on a rank; None:
                                 what fits into the memory that 1F1B needs
    offload_activations          share of the activations of every stage that waits in host memory between forward and
                                 backward, or one per stage; None: none
    auto_memory                  activations that "auto" may hold, over those that 1f1b holds with layers dealt evenly
    cut_memory                   the same of a schedule named by hand: the cut keeps to it; None: it follows time alone
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
