"""Models written in fp32 from training in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_files import LLAMA
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks

LAYOUTS: list[dict[str, Any]] = [{"zero_stage": 1}, {"zero_stage": 3}, {"tp_size": 2}, {"pp_size": 2}]


def save_on_rank(rank: int, world_size: int, folder: Path, layout: dict[str, Any]) -> None:
    torch.manual_seed(1)
    config = {name: value for name, value in LLAMA.items() if name != "model_type"}
    model: Any = LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=True))
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    optimizer: Any = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16", num_microbatches=2, **layout))
    model, optimizer, *_ = booster.boost(model, optimizer)
    rows = torch.randint(0, 260, (4, 12), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": rows, "labels": rows}
    booster.execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.loss, optimizer)
    optimizer.step()
    booster.save(str(folder / "all"), model=model, optimizer=optimizer)
    booster.save_model(model, str(folder / "half"), shard=True)
    booster.save_model(model, str(folder / "whole"), shard=True, masters=True)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_masters_are_written_whole(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Rounded they are the working weights; unrounded they are what a model of plain torch would have stepped on."""
    run_ranks(save_on_rank, 2, tmp_path, layout)
    half, whole = weights_of(tmp_path / "half"), weights_of(tmp_path / "whole")
    assert half.keys() == whole.keys()
    for name, value in whole.items():
        assert value.dtype == torch.float32
        assert torch.equal(value.bfloat16(), half[name].bfloat16()), name
    lost = [name for name, value in whole.items() if not torch.equal(value, value.bfloat16().float())]
    assert "model.layers.0.mlp.up_proj.weight" in lost
    model = LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    assert model.dtype == torch.float32
    again: Any = LlamaForCausalLM(model.config)
    booster = Booster()
    boosted, *_ = booster.boost(again)
    booster.load_model(boosted, str(tmp_path / "all"))
    for (name, saved), kept in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(saved, kept.float().cpu()), name
