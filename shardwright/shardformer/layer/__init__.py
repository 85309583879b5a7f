"""The tensor-parallel layers, for people who write their own policy or model."""

from typing import Any

from ..._moved import missing_name
from ...ops.vocab_mode import whole_logits
from .conv1d import GPT2FusedLinearConv1D_Col, GPT2FusedLinearConv1D_Row
from .dropout import DropoutForParallelInput, DropoutForReplicatedInput
from .embedding import Embedding1D, VocabParallelEmbedding1D, VocabParallelLMHead1D
from .linear import FusedLinear1D_Col, FusedLinear1D_Row, Linear1D_Col, Linear1D_Row
from .loss import cross_entropy_1d
from .norm import FusedLayerNorm, FusedRMSNorm, LayerNorm, RMSNorm
from .parallel_module import ParallelModule

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
