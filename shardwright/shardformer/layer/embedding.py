"""Embeddings whose rows (the vocabulary) or columns (the hidden size) are dealt to the ranks, and the vocabulary's
head.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn as nn
from torch import Tensor

from ...comm.quantised_wire import exact_group
from ...ops.collective import reduce_from_group
from ...ops.embedding import vocab_embedding
from ...ops.vocab_mode import as_scripts_see, in_forward, mark_vocab_sharded
from ...ops.vocab_shard import VocabShard
from ...spec import ParamSpec
from ..splits import Even, Pieces, Split, Vocabulary
from .linear import ColumnParallel, gather_features, join_name, shape_of, shard_column
from .parallel_module import Groups, ParallelGroup, ParallelModule, constructor, own_forward, shard_parameters


class VocabParallel(ParallelModule):
    """Every rank looks up the ids that it holds; the sum over the ranks is the embedding.

    ids [...] -> [..., H]; weight [V/n (padded), H]
    """

    weight: Tensor
    padding_idx: int | None
    global_padding_idx: int | None
    num_embeddings: int
    vocabulary: VocabShard

    @classmethod
    def shard(cls, module: nn.Module, parallel: ParallelGroup, specs: dict[str, ParamSpec]) -> Self:
        shard_parameters(module, specs, parallel.rank)
        layer = cls.adopt(module, parallel)
        layer.vocabulary = VocabShard.from_spec(specs["weight"], exact_group(parallel.group))
        layer.global_padding_idx = layer.padding_idx
        layer.num_embeddings = layer.weight.shape[0]
        layer.padding_idx = None
        if layer.global_padding_idx is not None:
            local = layer.global_padding_idx % layer.vocabulary.size - layer.vocabulary.start
            layer.padding_idx = local if 0 <= local < layer.vocabulary.length else None
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        shard = self.vocabulary
        if self.only_looks_up:
            return vocab_embedding(ids, self.weight, shard, self.global_padding_idx)
        # A subclass does something of its own to the rows (scales them): let it, on this rank's rows.
        foreign = (ids < shard.start) | (ids >= shard.start + shard.length)
        rows = super().forward(  # type: ignore[misc]
            (ids - shard.start).masked_fill(foreign, 0)
        )
        return reduce_from_group(rows.masked_fill(foreign.unsqueeze(-1), 0), shard.group)

    @property
    def only_looks_up(self) -> bool:
        """Whether nothing but rows of the weight comes out, so that backward reads no weight."""
        return own_forward(self) is nn.Embedding.forward

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} of {self.vocabulary.size} rows, {self.weight.shape[1]}"


class HiddenParallel(ParallelModule):
    """Every rank looks up its slice of the columns.

    ids [...] -> [..., H/n], or [..., H] when gathered; weight [V, H/n]
    """

    weight: Tensor
    embedding_dim: int
    gather_output: bool
    _gathered_pieces: Pieces

    @classmethod
    def shard(
        cls, module: nn.Module, parallel: ParallelGroup, specs: dict[str, ParamSpec], gather_output: bool = False
    ) -> Self:
        shard_parameters(module, specs, parallel.rank)
        layer = cls.adopt(module, parallel)
        layer.gather_output = gather_output
        layer.embedding_dim = layer.weight.shape[1]
        layer._gathered_pieces = specs["weight"].pieces
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        columns = super().forward(ids)  # type: ignore[misc]
        return gather_features(columns, self._gathered_pieces, self.parallel.group) if self.gather_output else columns


class LogitsParallel(ColumnParallel):
    """The head over the vocabulary: every rank computes the logits of the ids that it holds.

    [T, H] -> [T, V/n (padded)], marked so that the loss that the model computes from them is that of the whole
    vocabulary (see `shardwright.ops.vocab_mode`); where a script calls it, what a script may read. With
    `gather_output`, and while text is generated, [T, V] on every rank, without padding.
    """

    vocabulary: VocabShard

    @classmethod
    def shard(
        cls, module: nn.Module, parallel: ParallelGroup, specs: dict[str, ParamSpec], gather_output: bool = False
    ) -> Self:
        layer = super().shard(module, parallel, specs, gather_output)
        layer.vocabulary = VocabShard.from_spec(specs["weight"], exact_group(parallel.group))
        return layer

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if self.gather_output:
            return logits
        marked = mark_vocab_sharded(logits, self.vocabulary)
        return marked if in_forward() else as_scripts_see(marked)


class Embedding1D(HiddenParallel, nn.Embedding):
    """An embedding sharded over its hidden size.

    gather_output   whether the output has all columns on every rank
    """

    @constructor
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: Groups | None = None,
        gather_output: bool = True,
    ) -> None:
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        type(self).from_native_module(self, process_group, gather_output=gather_output)

    @classmethod
    def _from_native(
        cls, module: nn.Module, parallel: ParallelGroup, *, split: Split | None = None, gather_output: bool = True
    ) -> nn.Module:
        require_embedding(module, cls.__name__)
        pieces = (split or Even()).pieces(shape_of(module)[1], parallel.size, module)
        return hidden_class(module).shard(module, parallel, hidden_specs("", module, pieces), gather_output)


class VocabParallelEmbedding1D(VocabParallel, nn.Embedding):
    """An embedding sharded over its vocabulary, padded so that every rank holds a multiple of
    `make_vocab_size_divisible_by` rows.
    """

    @constructor
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: Groups | None = None,
        *,
        make_vocab_size_divisible_by: int = 64,
    ) -> None:
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        type(self).from_native_module(self, process_group, make_vocab_size_divisible_by=make_vocab_size_divisible_by)

    @classmethod
    def _from_native(
        cls, module: nn.Module, parallel: ParallelGroup, *, make_vocab_size_divisible_by: int = 64
    ) -> nn.Module:
        require_embedding(module, cls.__name__)
        pieces = Vocabulary(make_vocab_size_divisible_by).pieces(shape_of(module)[0], parallel.size, module)
        return vocab_class(module).shard(module, parallel, vocab_specs("", module, pieces))


class VocabParallelLMHead1D(LogitsParallel, nn.Linear):
    """A linear over the vocabulary, sharded and padded like `VocabParallelEmbedding1D`.

    gather_output   whether the logits of the whole vocabulary come out on every rank
    """

    @constructor
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: Groups | None = None,
        *,
        gather_output: bool = False,
        make_vocab_size_divisible_by: int = 64,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        type(self).from_native_module(
            self, process_group, gather_output=gather_output, make_vocab_size_divisible_by=make_vocab_size_divisible_by
        )

    @classmethod
    def _from_native(
        cls,
        module: nn.Module,
        parallel: ParallelGroup,
        *,
        gather_output: bool = False,
        make_vocab_size_divisible_by: int = 64,
    ) -> nn.Module:
        return shard_column(
            module, parallel, Vocabulary(make_vocab_size_divisible_by), gather_output, head_class(module)
        )


def vocab_specs(name: str, module: nn.Module, pieces: Pieces) -> dict[str, ParamSpec]:
    """Layout of an embedding sharded over its vocabulary; `name` is the module's."""
    return {"weight": ParamSpec(join_name(name, "weight"), shape_of(module), 0, pieces)}


def hidden_specs(name: str, module: nn.Module, pieces: Pieces) -> dict[str, ParamSpec]:
    """Layout of an embedding sharded over its hidden size."""
    return {"weight": ParamSpec(join_name(name, "weight"), shape_of(module), 1, pieces)}


def vocab_class(module: nn.Module) -> type[VocabParallel]:
    return VocabParallelEmbedding1D if type(module) is nn.Embedding else VocabParallel


def hidden_class(module: nn.Module) -> type[HiddenParallel]:
    return Embedding1D if type(module) is nn.Embedding else HiddenParallel


def head_class(module: nn.Module) -> type[LogitsParallel]:
    return VocabParallelLMHead1D if type(module) is nn.Linear else LogitsParallel


def require_embedding(module: nn.Module, style: str) -> None:
    if not isinstance(module, nn.Embedding):
        raise ValueError(f"{style} shards nn.Embedding (and subclasses), not {type(module).__name__}")
    if module.max_norm is not None or module.sparse:
        raise ValueError(f"{style} cannot shard an embedding with max_norm or sparse gradients; build it without them")
