"""The tensor-parallel layers, for people who write their own policy or model."""

from typing import Any

from shardwright._moved import missing_name
from shardwright.ops.vocab_mode import whole_logits
from shardwright.shardformer.layer.embedding import Embedding1D, VocabParallelEmbedding1D, VocabParallelLMHead1D
from shardwright.shardformer.layer.linear import (
    FusedLinear1D_Col,
    FusedLinear1D_Row,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
)
from shardwright.shardformer.layer.loss import cross_entropy_1d
from shardwright.shardformer.layer.norm import FusedLayerNorm, FusedRMSNorm, LayerNorm, RMSNorm
from shardwright.shardformer.layer.parallel_module import ParallelModule
from shardwright.shardformer.rng import DropoutForParallelInput, DropoutForReplicatedInput

__all__ = [
    "DropoutForParallelInput",
    "DropoutForReplicatedInput",
    "Embedding1D",
    "FusedLayerNorm",
    "FusedLinear1D_Col",
    "FusedLinear1D_Row",
    "FusedRMSNorm",
    "GPT2FusedLinearConv1D_Col",
    "GPT2FusedLinearConv1D_Row",
    "LayerNorm",
    "Linear1D_Col",
    "Linear1D_Row",
    "ParallelModule",
    "RMSNorm",
    "VocabParallelEmbedding1D",
    "VocabParallelLMHead1D",
    "cross_entropy_1d",
    "whole_logits",
]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
