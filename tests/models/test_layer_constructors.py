"""Layers by constructor compute what whole ones do, and name the argument that they cannot take."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright
from shardwright.shardformer.layer import (
    DropoutForParallelInput,
    DropoutForReplicatedInput,
    Embedding1D,
    FusedLayerNorm,
    FusedLinear1D_Col,
    FusedLinear1D_Row,
    FusedRMSNorm,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    LayerNorm,
    Linear1D_Col,
    Linear1D_Row,
    RMSNorm,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from shardwright.shardformer.layer.parallel_module import full_tensor, unshard
from shardwright.spec import get_spec
from shardwright.testing import run_ranks

SIZES = [6, 4, 5]  # of parts; the last is dealt unevenly


def built(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    neutral: dict[str, Any] = {"seq_parallel_mode": None, "skip_bias_add": False, "use_zbv": True, "weight": None}
    torch.manual_seed(3)
    column: Any
    row: Any
    for column, row in (
        (
            FusedLinear1D_Col(8, 15, SIZES, True, torch.float64, None, group, **neutral),
            FusedLinear1D_Row(15, 8, SIZES, True, torch.float64, None, [group], **neutral),
        ),
        (
            GPT2FusedLinearConv1D_Col(8, 15, SIZES, dtype=torch.float64, process_group=(group,), **neutral),
            FusedLinear1D_Row(15, 8, SIZES, dtype=torch.float64, process_group=group),
        ),
        (
            Linear1D_Col(8, 15, dtype=torch.float64, process_group=group, **neutral),
            GPT2FusedLinearConv1D_Row(15, 8, dtype=torch.float64, process_group=group, stream_chunk_num=2),
        ),
    ):
        is_conv = [isinstance(layer, GPT2FusedLinearConv1D_Col | GPT2FusedLinearConv1D_Row) for layer in (column, row)]
        assert column.weight.shape == ((8, 8 - rank) if is_conv[0] else (8 - rank, 8))
        weights = [full_tensor(layer.weight, group).requires_grad_() for layer in (column, row)]
        biases = [full_tensor(layer.bias, group).requires_grad_() for layer in (column, row)]
        x = torch.randn(5, 8, dtype=torch.float64)
        hidden = x @ (weights[0] if is_conv[0] else weights[0].T) + biases[0]
        expected = hidden.tanh() @ (weights[1] if is_conv[1] else weights[1].T) + biases[1]
        actual = row(column(x).tanh())
        torch.testing.assert_close(actual, expected)
        expected.square().sum().backward()
        actual.square().sum().backward()
        for layer, weight, bias in zip((column, row), weights, biases, strict=True):
            for param, whole in ((layer.weight, weight), (layer.bias, bias)):
                spec = get_spec(param)
                grad = unshard(param.grad, spec, group) if spec is not None and spec.is_sharded else param.grad
                torch.testing.assert_close(grad, whole.grad)
    others(group)


def others(group: Any) -> None:
    """Embeddings, the head, dropout with groups in lists and in copies."""
    embedding = VocabParallelEmbedding1D(20, 8, process_group=group, make_vocab_size_divisible_by=4, weight=None)
    assert embedding.weight.shape == (12, 8)
    assert Embedding1D(20, 8, 0, None, None, group, True, fp8_communication=False).weight.shape == (20, 4)
    head = VocabParallelLMHead1D(8, 20, process_group=group, gather_output=True, make_vocab_size_divisible_by=4)
    assert (head.bias.shape, head(torch.ones(3, 8)).shape) == ((12,), (3, 20))
    ones = torch.ones(2000)
    for groups in ([group], (group,), group, None):
        for kind, agreement in ((DropoutForParallelInput, 0.75), (DropoutForReplicatedInput, 1.0)):
            dropout = copy.deepcopy(kind(0.5, process_group=groups))
            kept = [torch.empty_like(ones) for _ in range(2)]
            dist.all_gather(kept, dropout(ones), group=group)
            agreed = float((kept[0] == kept[1]).double().mean())
            assert agreed == 1 if agreement == 1 else agreed < agreement


def test_layers_by_constructor_compute_what_whole_ones_do() -> None:
    run_ranks(built, 2)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LOCAL_RANK", "0")
    shardwright.launch(0, 2, None, None, backend="fake")
    yield
    dist.destroy_process_group()


REFUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (
        Linear1D_Col,
        (8, 8),
        {"gather": True},
        "Linear1D_Col takes no argument gather=True - did you mean 'gather_output",
    ),
    (Linear1D_Col, (8, 8), {"nonsense": 1}, "Linear1D_Col takes no argument nonsense=1; it takes in_features"),
    (
        Linear1D_Col,
        (8, 8),
        {"skip_bias_add": True},
        "Linear1D_Col: skip_bias_add=True cannot be had: the bias is added",
    ),
    (Linear1D_Row, (8, 8), {"seq_parallel_mode": "ring"}, "Linear1D_Row: seq_parallel_mode='ring' cannot be had"),
    (Linear1D_Row, (8, 8), {"weight": nn.Parameter(torch.ones(8, 8))}, "from_native_module shards the weight of a"),
    (Linear1D_Col, (8, 8), {"weight_initializer": nn.init.ones_}, "weight_initializer=.* cannot be had"),
    (Linear1D_Row, (8, 8, True, None, None, None, None), {}, "7 positional arguments and takes at most 6"),
    (Linear1D_Col, ("8", 8), {}, "in_features='8' must be a whole number"),
    (Linear1D_Col, (8, 8), {"bias": "yes"}, "bias='yes' must be True or False; use True"),
    (Linear1D_Col, (8,), {}, "Linear1D_Col: missing a required argument: 'out_features'"),
    (Linear1D_Col, (8, 8), {"process_group": "tp"}, "process_group='tp' must be a torch.distributed.ProcessGroup"),
    (FusedLinear1D_Col, (8, 12), {}, "FusedLinear1D_Col: missing a required argument: 'split_sizes'"),
    (FusedLinear1D_Col, (8, 12), {"split_sizes": 3}, r"split_sizes=3 must be a list of whole numbers, such as \[4"),
    (FusedLinear1D_Row, (12, 8), {"split_sizes": [4, 4]}, r"parts \(4, 4\) add up to 8, but there are 12 features"),
    (GPT2FusedLinearConv1D_Col, (8, 12, True), {}, "split_sizes=True must be a list of whole numbers"),
    (
        VocabParallelEmbedding1D,
        (8, 8),
        {"gather_output": True},
        "VocabParallelEmbedding1D takes no argument gather_out",
    ),
    (DropoutForParallelInput, (0.5,), {"group": None}, "DropoutForParallelInput takes no argument group=None"),
    (DropoutForParallelInput, ("0.5",), {}, "p='0.5' must be a number; use 0.5"),
    (LayerNorm, (8,), {}, r"LayerNorm is not built by itself.*LayerNorm.from_native_module\(nn.LayerNorm\(8\)\)"),
    (FusedLayerNorm, (), {}, "FusedLayerNorm is not built by itself"),
    (RMSNorm, (8,), {"eps": 1e-5}, r"RMSNorm is not built by itself.*RMSNorm.from_native_module\(nn.RMSNorm\(8\)\)"),
    (FusedRMSNorm, (8,), {}, "FusedRMSNorm is not built by itself"),
]


@pytest.mark.parametrize(("layer", "args", "kwargs", "words"), REFUSED, ids=range(len(REFUSED)))
def test_constructors_name_what_they_cannot_take(layer: Any, args: Any, kwargs: Any, words: str, alone: Any) -> None:
    with pytest.raises(ValueError, match=words):
        layer(*args, **kwargs)


def test_modules_of_other_kinds_are_refused(alone: Any) -> None:
    for layer, module, words in (
        (DropoutForParallelInput, nn.Linear(2, 2), "DropoutForParallelInput takes nn.Dropout, not Linear"),
        (RMSNorm, nn.Linear(2, 2), "RMSNorm takes RMS norms, not Linear"),
        (Linear1D_Col, "up", "module='up' must be a module"),
        (Linear1D_Col, nn.LayerNorm(2), "not LayerNorm"),
    ):
        with pytest.raises(ValueError, match=words):
            layer.from_native_module(module)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="process_group is one that this rank is not in"):
        Linear1D_Col(4, 4, process_group=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
