"""What a plan of GPUs takes their kernels to keep and to make, on tensors without memory: as an H200 does
(docs/performance.md), wherever the plan is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright.cli.main import main
from shardwright.kernels.linear_cross_entropy import linear_cross_entropy
from shardwright.kernels.norms import rms_norm
from shardwright.planner.fakes import Fakes, is_fake
from shardwright.planner.live_bytes import LiveBytes
from shardwright.shardformer.layer.activation import fuse_activations
from shardwright.testing import zoo
from shardwright.utils.device import planning_for
from shardwright.utils.torch_names import SDPA

BF16 = torch.bfloat16


def kept(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> int:
    """Bytes that autograd keeps of `function` of tensors in bf16, each memory once."""
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Fakes():
        given = [torch.empty(shape, dtype=BF16, requires_grad=True) for shape in shapes]
        assert all(map(is_fake, given))
        with saved_tensors_hooks(note, lambda tensor: tensor):
            function(*given)
    return sum(found.values())


def test_attention_that_drops_out_is_one_kernel() -> None:
    """Queries, keys, values, what comes out, and a number for each row."""
    heads = (2, 4, 64, 32)

    def attend(*inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*inputs, dropout_p=0.1)

    with planning_for("cuda"):
        on_gpus = kept(attend, heads, heads, heads)
    with planning_for("cpu"):
        on_cpus = kept(attend, heads, heads, heads)
    numbers = 2 * 4 * 64
    assert on_gpus == 4 * numbers * 32 * 2 + numbers * 4
    assert on_cpus > on_gpus + numbers * 64  # scores
    assert F.scaled_dot_product_attention is SDPA


def test_attention_with_a_trained_bias_is_one_kernel() -> None:
    """Of a bias [H, S, S] for all samples alike, whose gradient is there, too."""
    heads, bias = (2, 4, 64, 32), (1, 4, 64, 64)

    def attend(query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, added, scale=1.0)

    with planning_for("cuda"):
        numbers = 2 * 4 * 64
        seeds = 2 * 8  # of what is dropped
        assert kept(attend, heads, heads, heads, bias) == 4 * numbers * 32 * 2 + numbers * 4 + 4 * 64 * 64 * 2 + seeds
        with Fakes():
            given = [torch.empty(shape, dtype=BF16, requires_grad=True) for shape in (heads, heads, heads, bias)]
            attend(*given).sum().backward()
            assert [tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in given] == [True] * 4


@pytest.mark.parametrize("training", [True, False])
def test_dropout_keeps_truth_values(training: bool) -> None:
    """A byte of every element; on a CPU a number of its dtype. In place that is so on GPUs, too."""
    shape = (48, 256)

    def drop(x: Tensor) -> Tensor:
        return torch.nn.Dropout(0.1).train(training)(x)

    def drop_in_place(x: Tensor) -> Tensor:
        return F.dropout(x.clone(), 0.1, training, inplace=True)

    numbers = 48 * 256 * training
    with planning_for("cuda"):
        assert kept(drop, shape) == numbers
        assert kept(drop_in_place, shape) == 2 * numbers
    with planning_for("cpu"):
        assert kept(drop, shape) == 2 * numbers
    assert F.dropout.__module__ == "torch.nn.functional"


def test_norms_keep_what_their_kernel_keeps() -> None:
    rows, columns = 48, 256
    with planning_for("cuda"):
        assert (
            kept(lambda x, w: rms_norm(x, w, 1e-6), (rows, columns), (columns,)) == (rows + 1) * columns * 2 + 4 * rows
        )
    with planning_for("cpu"):
        assert kept(lambda x, w: rms_norm(x, w, 1e-6), (rows, columns), (columns,)) > 2 * rows * columns * 2


def test_gates_are_found() -> None:
    """Which is tried with numbers."""
    with planning_for("cuda"), Fakes():
        assert fuse_activations(zoo.build("llama-causal-lm", dtype=torch.float32)) > 0


def test_rows_of_logits_are_not_made_wider() -> None:
    """Beside the logits of a chunk in bf16 nothing of their size is made."""
    tokens, width, words = 256, 64, 8192
    with planning_for("cuda"), Fakes(), LiveBytes() as live:
        x = torch.empty(tokens, width, dtype=BF16, requires_grad=True)
        weight = torch.empty(words, width, dtype=BF16)
        before = live.bytes()
        linear_cross_entropy(x, weight, torch.zeros(tokens, dtype=torch.int64), chunk=tokens).backward()
        logits = tokens * words * 2
        assert logits < live.most - before < 1.2 * logits


def test_products_in_8_bits_are_planned_without_a_device_that_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    """What is kept is what bf16 keeps, and a scale here and there."""
    layout = ["--model", "llama-tiny", "--world-size", "2", "--zero-stage", "1", "--batch-size", "2", "--seq-len", "32"]

    def most(*options: str) -> int:
        assert main(["plan", *layout, "--peak", "--json", *options]) == 0
        (peak,) = json.loads(capsys.readouterr().out)["peaks"]
        return int(peak["peak"])

    assert 0 < most("--use-fp8") - most() < 2**14
    if not torch.cuda.is_available():
        assert main(["plan", *layout, "--peak", "--use-fp8", "--device", "cpu"]) == 1
        assert "use_fp8=True: the device is cpu" in capsys.readouterr().out
