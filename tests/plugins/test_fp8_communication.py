"""`fp8_communication=True` trains as well as without, sends half the bytes or less, and leaves all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwright import Booster
from shardwright.comm.quantised import BYTES_PER_ELEMENT
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.shardformer import ShardConfig, ShardFormer
from shardwright.spec import get_spec
from shardwright.testing import run_ranks, zoo
from tests.ranks.counting import CountBytes

MODEL = "llama-causal-lm"
STEPS = 4
RATE = 3e-3

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "tp bf16": (HybridParallelPlugin, {"tp_size": 2, "precision": "bf16"}),
    "tp split bf16": (HybridParallelPlugin, {"tp_size": 2, "precision": "bf16", "enable_sequence_parallelism": True}),
    "pp zb bf16": (HybridParallelPlugin, {"pp_size": 2, "num_microbatches": 2, "pp_style": "zb", "precision": "bf16"}),
    "zero 0 fp32": (HybridParallelPlugin, {"precision": "fp32", "ddp_bucket_cap_mb": 0.05}),
    "zero 1 bf16": (LowLevelZeroPlugin, {"stage": 1, "precision": "bf16", "overlap_allgather": True}),
    "zero 2 fp16": (LowLevelZeroPlugin, {"stage": 2, "precision": "fp16", "initial_scale": 2.0**8}),
    "zero 3 bf16": (LowLevelZeroPlugin, {"stage": 3, "precision": "bf16"}),
    "ddp": (TorchDDPPlugin, {}),
    "fsdp": (TorchFSDPPlugin, {"mixed_precision": "bf16", "reshard_after_forward": False}),
}


def build() -> nn.Module:
    return zoo.build(MODEL, dtype=torch.float32, num_hidden_layers=2, hidden_size=64, intermediate_size=128)


def train(kind: type, settings: dict[str, Any], quantises: bool, rank: int) -> tuple[list[float], CountBytes, Any, Any]:
    plugin = kind(**settings, fp8_communication=quantises)
    booster = Booster(plugin=plugin)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    shared = settings.get("tp_size", 1) * settings.get("pp_size", 1) > 1
    batch = zoo.inputs(MODEL, batch_size=8, seq_len=24)
    mine = batch if shared else {name: value[4 * rank : 4 * rank + 4] for name, value in batch.items()}
    planned = 0.0
    if isinstance(plugin, HybridParallelPlugin):
        layout = plugin.preflight(model, optimizer, len(mine["input_ids"]), 24)
        planned = sum(traffic.sent or 0 for traffic in layout.traffic) * STEPS
    trained, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    with CountBytes() as sent:
        for _ in range(STEPS):
            if settings.get("pp_size"):
                loss = booster.execute_pipeline(iter([mine]), trained, None, optimizer, return_loss=True)["loss"]
            else:
                loss = trained(**mine).loss
                booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float("nan") if loss is None else loss.item())
    # which leaves out what carries a few numbers per token, such as the loss over a split vocabulary, and with split
    # sequences what is before and behind the layers
    if planned and "enable_sequence_parallelism" not in settings:
        assert sent.bytes == pytest.approx(planned, rel=0.025), (settings, sent.bytes, planned)
    return losses, sent, trained, optimizer


def on_rank(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for name, (kind, settings) in CASES.items():
        exact, plain, *_ = train(kind, settings, False, rank)
        rounded, sent, model, optimizer = train(kind, settings, True, rank)
        alike = {}
        if "pp_size" not in settings and kind is not TorchFSDPPlugin:  # whose parameters are parts
            for each, param in model.unwrap().named_parameters():
                spec = get_spec(param)
                if spec is None or not spec.is_sharded:
                    alike[each] = param.detach().clone()
        if name.startswith("zero 1"):
            _check_masters(optimizer)
        found[name] = (exact, rounded, plain.by_dtype, sent.by_dtype, alike)
    _model_in_64_bits()
    return found


def _check_masters(optimizer: Any) -> None:
    """Working parameters are their masters but for half a unit of bf16 and 2^-4 of a step: errors do not pile up."""
    for bucket in optimizer.buckets:
        distance = (bucket.own_flat.float() - bucket.master).abs()
        assert (distance <= 2.0**-8 * bucket.master.abs() + 2.0**-4 * 2 * RATE).all()
        assert not torch.equal(bucket.own_flat, bucket.master.to(bucket.dtype))  # or nothing was rounded


def _model_in_64_bits() -> None:
    settings: list[tuple[type, dict[str, Any]]] = [
        (HybridParallelPlugin, {"precision": "fp32"}),
        (LowLevelZeroPlugin, {"precision": "fp32"}),
        (TorchDDPPlugin, {}),
        (TorchFSDPPlugin, {}),
    ]
    for kind, others in settings:
        with pytest.raises(ValueError, match=r"fp8_communication=True: .* is in torch.float64.*model.float()"):
            Booster(plugin=kind(**others, fp8_communication=True)).boost(build().double())
    with pytest.raises(ValueError, match=r"fp8_communication=True: .* is in torch.float64"):
        ShardFormer(ShardConfig(fp8_communication=True)).shard_model(build().double())
    Booster(plugin=LowLevelZeroPlugin(fp8_communication=True)).boost(build().double())  # which works in bf16


def test_training_with_it_stays_close_and_sends_little() -> None:
    first, second = run_ranks(on_rank, 2)
    for name in CASES:
        for exact, rounded, plain, sent, alike in (first[name], second[name]):
            losses = [(a, b) for a, b in zip(exact, rounded, strict=True) if a == a]  # the last stage's
            distance = 0.1 if name in ("zero 3 bf16", "fsdp") else 0.04
            assert all(abs(a - b) <= distance * a for a, b in losses), (name, losses)
            assert not losses or exact != rounded, name
            quantised = _elements(plain) - _elements(sent)
            bytes_of_it = sent[torch.uint8] - plain[torch.uint8]
            assert bytes_of_it == pytest.approx(BYTES_PER_ELEMENT * quantised, rel=0.005), name
            kept = 0.12 if name.startswith("tp") else 0.0  # of the vocabulary's table and of the loss
            assert _elements(sent) <= kept * _elements(plain), name
            for each, weight in alike.items():
                assert torch.equal(weight, second[name][-1][each]), (name, each)


def _elements(by_dtype: dict[torch.dtype, float]) -> float:
    """Of floating-point tensors that could travel in 8 bits."""
    return sum(by_dtype.get(dtype, 0) / dtype.itemsize for dtype in (torch.float32, torch.bfloat16, torch.float16))
