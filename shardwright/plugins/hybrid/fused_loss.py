"""What the layout report says of losses that are computed without logits."""

from __future__ import annotations

import math

from torch import nn

from ...cluster.mesh import ParallelMesh
from ...kernels.linear_cross_entropy import tokens_at_a_time
from ...shardformer.fused_head import fusable_heads
from ...utils.device import get_current_device
from ..settings import HybridSettings
from .preflight import BatchShape


def fused_loss_words(
    model: nn.Module, settings: HybridSettings, mesh: ParallelMesh, batch: BatchShape, microbatches: int | None
) -> str:
    """How a model that is whole will compute its cross entropy; empty where its logits will be there anyway."""
    options, ranks = settings.sharding, mesh.size("tp")
    heads = fusable_heads(model) if options.enable_fused_cross_entropy else []
    if not heads or (ranks > 1 and not options.parallel_output):
        return ""
    most = max(head.weight.shape[0] for head in heads)
    chunk = tokens_at_a_time(get_current_device(), math.ceil(most / ranks))
    if not batch.samples or not batch.length or not microbatches:
        return f"cross entropy fused ({chunk} tokens at a time)"
    tokens = math.ceil(batch.samples / microbatches) * math.ceil(batch.length / mesh.size("sp"))
    if tokens <= chunk:
        return f"cross entropy of whole logits ({tokens} tokens are no more than a chunk of {chunk})"
    return f"cross entropy fused over {math.ceil(tokens / chunk)} chunks"
