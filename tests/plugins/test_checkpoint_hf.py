"""Ours -> from_pretrained -> save_pretrained -> ours, bit by bit, from and into sharded models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from checkpoint_ranks import EXPERTS, LAYOUTS
from safetensors import safe_open
from torch import nn

from shardwright import Booster
from shardwright.files.boxes import Box
from shardwright.files.huggingface import HfFiles
from shardwright.plugins import HybridParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import adamw, compare_models, run_ranks, zoo
from shardwright.utils.tensors import local_tensor

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# Families at layouts that cut what is special about them: tied weights, fused and renamed ones, experts merged in
# memory.
CASES = [
    ("llama-tied-causal-lm", "tp2-pp2"),
    ("gpt2-causal-lm", "tp2-zero3"),
    ("bert-masked-lm", "tp2-pp2"),
    ("t5-conditional-generation", "zbv-tp2"),
    ("qwen3-moe-causal-lm", "tp2-pp2"),
    ("mixtral-causal-lm", "zero1"),
    ("qwen3-moe-causal-lm", "tp2-ep2"),
    ("mixtral-causal-lm", "ep2-zero3"),
    ("vit-image-classification", "zero3"),
    ("bert-pretraining", "ddp"),
    ("opt-causal-lm", "fsdp"),
    ("chatglm-causal-lm", "tp2-pp2"),
]
SWEEP = [
    (name, layout)
    for name in zoo.names()
    for layout in ("tp2", "zero1-k2")
    if not (name.startswith("vit") and "tp" in layout)
]


def plugin_for(layout: str, precision: str) -> Any:
    if layout in LAYOUTS | EXPERTS:
        return HybridParallelPlugin(precision=precision, **(LAYOUTS | EXPERTS)[layout][1])
    return TorchDDPPlugin() if layout == "ddp" else TorchFSDPPlugin()


def keys_of(directory: Path) -> set[str]:
    keys: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            keys |= set(opened.keys())
    return keys


def wipe(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            local_tensor(param).zero_()


def round_trip(rank: int, world: int, name: str, layout: str, path: Path, shard: bool) -> None:
    plain = zoo.build(name, dtype=torch.float32)
    booster = Booster(plugin=plugin_for(layout, "fp32"))
    model = zoo.build(name, dtype=torch.float32)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    booster.save_model(model, path / "ours", shard=shard, size_per_shard=0.05)
    if rank == 0:
        check_transformers(plain, path)
    dist.barrier()
    for source in ("ours", "theirs"):
        wipe(model.unwrap())
        report = booster.load_model(model, path / source)
        assert report.fits
        compare_models(plain, model, coordinate=coordinate_of(booster), gradients=False, tolerance=0.0)
        shards = optimizer.shards() if hasattr(optimizer, "shards") else []
        weights = dict(plain.named_parameters())
        for part in shards:  # masters follow
            full = part.spec.shard(weights[part.name].detach(), coordinate_of(booster)(part.spec.axis))
            real = (
                part.spec.shard(torch.ones(part.spec.full_shape), coordinate_of(booster)(part.spec.axis)).flatten() > 0
            )
            window = slice(part.start, part.stop)
            assert torch.equal(part.master[real[window]], full.flatten()[window][real[window]])


def coordinate_of(booster: Booster) -> Any:
    mesh = getattr(booster.plugin, "mesh", None)
    return mesh.coordinate if mesh is not None else lambda axis: 0


def check_transformers(plain: nn.Module, path: Path) -> None:
    loaded: Any = type(plain)
    again, info = loaded.from_pretrained(path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    mine, theirs = plain.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert mine[key].dtype == theirs[key].dtype
        assert torch.equal(mine[key], theirs[key]), key
    again.save_pretrained(path / "theirs")
    assert keys_of(path / "ours") == keys_of(path / "theirs")
    ours, hf = (json.loads((path / side / "config.json").read_text()) for side in ("ours", "theirs"))
    assert (ours["architectures"], ours["dtype"]) == (hf["architectures"], hf["dtype"])
    assert (path / "ours" / "generation_config.json").exists() == (path / "theirs" / "generation_config.json").exists()


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}-{layout}" for name, layout in CASES])
def test_round_trip(name: str, layout: str, tmp_path: Path) -> None:
    world = (LAYOUTS | EXPERTS).get(layout, (2,))[0]
    run_ranks(round_trip, world, name, layout, tmp_path, CASES.index((name, layout)) % 2 == 0, debug="INFO")


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "layout"), SWEEP, ids=[f"{name}-{layout}" for name, layout in SWEEP])
def test_round_trip_of_every_model(name: str, layout: str, tmp_path: Path) -> None:
    run_ranks(round_trip, LAYOUTS[layout][0], name, layout, tmp_path, True, debug="INFO")


def variants(rank: int, world: int, path: Path) -> None:
    """bf16 weights, a prefix, one bare file, saving again over a directory, in the background."""
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16", tp_size=2))
    model = zoo.build("llama-causal-lm", dtype=torch.float32)
    model, _, *_ = booster.boost(model, adamw(model))
    whole = {
        name: param.detach().bfloat16()
        for name, param in zoo.build("llama-causal-lm", dtype=torch.float32).named_parameters()
    }
    booster.save_model(model, path / "bf16", shard=True, size_per_shard=0.05)
    (path / "bf16" / "tokenizer.json").touch()
    booster.save_model(model, path / "bf16", prefix="half")
    booster.save_model(model, path / "bf16", use_async=True)
    booster.save_model(model, path / "weights.safetensors")
    if rank == 0:
        names = {file.name for file in (path / "bf16").iterdir()}
        assert names == {
            "tokenizer.json",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "model.half.safetensors",
        }
        for variant in (None, "half"):
            again = transformers.AutoModelForCausalLM.from_pretrained(path / "bf16", variant=variant)
            assert all(torch.equal(param, whole[name]) for name, param in again.named_parameters())
            assert again.dtype == torch.bfloat16
    dist.barrier()
    wipe(model.unwrap())
    booster.load_model(model, path / "weights.safetensors")
    if rank == 0:
        with pytest.raises(ValueError, match="shard=True"):
            booster.save_model(model, path / "weights.safetensors", shard=True)
        with pytest.raises(ValueError, match="prefix"):
            booster.save_model(model, path / "x", prefix="../x")


def test_variants(tmp_path: Path) -> None:
    run_ranks(variants, 2, tmp_path)


def count_expert_reads(rank: int, world: int, name: str, path: Path) -> tuple[int, int]:
    """Elements of experts that this rank has read, and that it holds."""
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=2))
    model, *_ = booster.boost(zoo.build(name, dtype=torch.float32))
    experts = {key: param for key, param in model.unwrap().named_parameters() if ".experts." in key}
    found: list[int] = []
    read, view = HfFiles.read, HfFiles.tensor

    def reading(self: HfFiles, key: str, box: Box, out: torch.Tensor) -> None:
        found.append(out.numel() if ".experts." in key else 0)
        read(self, key, box, out)

    def viewing(self: HfFiles, key: str) -> torch.Tensor:  # by which whole tensors are converted
        tensor = view(self, key)
        found.append(tensor.numel() if ".experts." in key else 0)
        return tensor

    wipe(model.unwrap())
    HfFiles.read, HfFiles.tensor = reading, viewing  # type: ignore[method-assign]
    try:
        assert booster.load_model(model, path).fits
    finally:
        HfFiles.read, HfFiles.tensor = read, view  # type: ignore[method-assign]
    whole = zoo.build(name, dtype=torch.float32)
    compare_models(whole, model, coordinate=coordinate_of(booster), gradients=False, tolerance=0.0)
    assert experts
    return sum(found), sum(param.numel() for param in experts.values())


@pytest.mark.parametrize("name", ["mixtral-causal-lm", "qwen3-moe-causal-lm"])
def test_a_rank_reads_its_part_of_fused_experts_alone(name: str, tmp_path: Path) -> None:
    whole = zoo.build(name, dtype=torch.float32)
    whole.save_pretrained(tmp_path)
    size = sum(param.numel() for key, param in whole.named_parameters() if ".experts." in key)
    for read, held in run_ranks(count_expert_reads, 2, name, tmp_path):
        assert read == held == size // 2


def misfit(rank: int, world: int, path: Path) -> tuple[list[str], list[str], list[str]]:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", pp_size=2, num_microbatches=2))
    model, *_ = booster.boost(zoo.build("llama-causal-lm", dtype=torch.float32))
    try:
        booster.load_model(model, path)
    except ValueError as error:
        return error.missing, error.unexpected, error.mismatched  # type: ignore[attr-defined]
    return [], [], []


def test_misfits_are_reported_on_every_stage_alike(tmp_path: Path) -> None:
    other = zoo.build("llama-biased-causal-lm", dtype=torch.float32, vocab_size=99)
    other.save_pretrained(tmp_path)
    first, second = run_ranks(misfit, 2, tmp_path)
    assert first == second
    missing, unexpected, mismatched = first
    assert missing == []
    assert len(unexpected) == 4 * 7
    assert [line.split()[0] for line in mismatched] == ["lm_head.weight", "model.embed_tokens.weight"]
