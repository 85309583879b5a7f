"""The tensor-parallel layers, for people who write their own policy or model."""

from shardwright.ops.vocab_mode import whole_logits
from shardwright.shardformer.layer.embedding import Embedding1D, VocabParallelEmbedding1D, VocabParallelLMHead1D
from shardwright.shardformer.layer.linear import FusedLinear1D_Col, Linear1D_Col, Linear1D_Row
from shardwright.shardformer.layer.loss import cross_entropy_1d
from shardwright.shardformer.layer.norm import FusedLayerNorm, FusedRMSNorm
from shardwright.shardformer.layer.parallel_module import ParallelModule
from shardwright.shardformer.rng import DropoutForParallelInput, DropoutForReplicatedInput

__all__ = [
    "DropoutForParallelInput",
    "DropoutForReplicatedInput",
    "Embedding1D",
    "FusedLayerNorm",
    "FusedLinear1D_Col",
    "FusedRMSNorm",
    "Linear1D_Col",
    "Linear1D_Row",
    "ParallelModule",
    "VocabParallelEmbedding1D",
    "VocabParallelLMHead1D",
    "cross_entropy_1d",
    "whole_logits",
]
