"""LoRA adapters under HybridParallelPlugin: loss, adapter gradients and updated weights against one process, and
files that peft reads.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import MambaConfig, MambaForCausalLM

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import compare_models, keep_float64, run_ranks, zoo

TWO = {"num_hidden_layers": 2}
LLAMA = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
LAYOUTS: list[tuple[str, list[str], int, dict[str, Any], dict[str, Any]]] = [
    ("llama-causal-lm", LLAMA, 2, {"zero_stage": 1}, {}),
    ("llama-causal-lm", LLAMA, 2, {"pp_size": 2, "num_microbatches": 3}, {}),
    ("llama-causal-lm", LLAMA, 2, {"tp_size": 2}, {}),
    (
        "llama-tied-causal-lm",
        LLAMA,
        4,
        {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "pp_style": "zb", "max_norm": 0.05},
        {},
    ),
    ("llama-causal-lm", LLAMA, 4, {"tp_size": 4, "max_norm": 0.05}, {}),  # two key/value heads on four ranks
    ("gpt2-causal-lm", ["c_attn", "c_proj", "c_fc"], 4, {"tp_size": 2, "zero_stage": 2}, {"fan_in_fan_out": True}),
    ("llama-causal-lm", LLAMA, 2, {"zero_stage": 3}, {}),
    # The head is a stage of its own, which has nothing to train.
    (
        "llama-causal-lm",
        LLAMA,
        2,
        {"pp_size": 2, "num_microbatches": 2, "num_layers_per_stage": [2, 0], "max_norm": 0.05},
        {},
    ),
    (
        "llama-causal-lm",
        LLAMA,
        2,
        {"pp_size": 2, "num_microbatches": 2, "num_layers_per_stage": [2, 0], "zero_stage": 3},
        {},
    ),
    ("llama-sequence-classification", ["q_proj", "v_proj"], 2, {"tp_size": 2}, {"task_type": "SEQ_CLS"}),
]


def _depth(name: str) -> dict[str, Any]:
    return {"n_layer": 2} if name.startswith("gpt2") else TWO


def adapters(targets: list[str], **settings: Any) -> Any:
    return peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": targets, "task_type": "CAUSAL_LM", **settings})


def perturb(model: nn.Module) -> None:
    """B starts at zero, and then A has no gradient: give every adapter values, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-3)


def _train(rank: int, world: int, number: int) -> int:
    name, targets, _, layout, settings = LAYOUTS[number]
    with keep_float64():
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **layout))
        plugin: Any = booster.plugin
        model = booster.enable_lora(
            zoo.build(name, dtype=torch.float64, **_depth(name)), lora_config=adapters(targets, **settings)
        )
        perturb(model)
        reference = copy.deepcopy(model)
        reference_optimizer = trained(reference)
        boosted, optimizer, *_ = booster.boost(model, trained(model))
        frozen = 0
        for step in range(2):
            batch = zoo.inputs(name, batch_size=4 * plugin.dp_size, seq_len=11, seed=step, **_depth(name))
            first = 4 * plugin.mesh.coordinate("dp")
            mine = {key: value[first : first + 4] for key, value in batch.items()}
            expected = reference(**batch).loss
            expected.backward()
            result = booster.execute_pipeline(iter([mine]), boosted, None, optimizer)
            losses = (expected.detach().reshape(1), result["loss"].reshape(1)) if result["loss"] is not None else None
            compare_models(
                reference,
                boosted,
                coordinate=plugin.mesh.coordinate,
                losses=losses,
                gradients=optimizer.gradients(),
                weights=False,
            )
            if layout.get("max_norm"):
                nn.utils.clip_grad_norm_(reference.parameters(), layout["max_norm"])
            for each in (reference_optimizer, optimizer):
                each.step()
                each.zero_grad()
            compare_models(reference, boosted, coordinate=plugin.mesh.coordinate, gradients=False)
            frozen = sum(not param.requires_grad for param in boosted.parameters())
        assert frozen, "the model's own weights are frozen"
        return frozen


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[f"{name}-{layout}" for name, _, _, layout, _ in LAYOUTS])
def test_adapters_train_as_in_one_process(number: int) -> None:
    run_ranks(_train, LAYOUTS[number][2], number)


def _save(rank: int, world: int, layout: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Train a step, save, and return what the adapters of the whole model are by a way of their own: the
    reference's.
    """
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **layout))
    plain = zoo.build("llama-causal-lm", dtype=torch.float64, **TWO)
    model = booster.enable_lora(plain, lora_config=adapters(LLAMA))
    perturb(model)
    reference = copy.deepcopy(model)
    optimizer = trained(reference)
    batch = zoo.inputs("llama-causal-lm", batch_size=4, seq_len=11)
    with keep_float64():
        boosted, wrapped, *_ = booster.boost(model, trained(model))
        reference(**batch).loss.backward()
        optimizer.step()
        booster.execute_pipeline(iter([batch]), boosted, None, wrapped)
        wrapped.step()
    booster.save_lora_as_pretrained(boosted, path)
    return {name: param.detach() for name, param in reference.named_parameters() if "lora_" in name}


@pytest.mark.parametrize(
    ("world", "layout"),
    [(4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}), (2, {"zero_stage": 3}), (2, {"zero_stage": 1})],
)
def test_saved_adapters_are_those_of_the_whole_model(world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    expected = run_ranks(_save, world, layout, tmp_path)[0]
    loaded = peft.PeftModel.from_pretrained(
        zoo.build("llama-causal-lm", dtype=torch.float64, **TWO), tmp_path, is_trainable=True
    )
    found = {name: param.detach() for name, param in loaded.named_parameters() if "lora_" in name}
    assert found.keys() == expected.keys()
    for name, param in found.items():
        torch.testing.assert_close(param, expected[name].to(param.dtype), rtol=1e-8, atol=1e-9)
    again = Booster().enable_lora(
        zoo.build("llama-causal-lm", dtype=torch.float64, **TWO), pretrained_dir=str(tmp_path)
    )
    assert sum(param.requires_grad for param in again.parameters()) == len(expected)


def _refusals(rank: int, world: int) -> list[str]:
    said = []
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=2))
    for targets, settings in ((LLAMA, {"use_dora": True}),):
        model = booster.enable_lora(
            zoo.build("llama-causal-lm", dtype=torch.float32, **TWO), lora_config=adapters(targets, **settings)
        )
        with pytest.raises(ValueError) as caught:
            booster.boost(model, trained(model))
        said.append(str(caught.value))
    plain = zoo.build("llama-causal-lm", dtype=torch.float32, **TWO)
    boosted, *_ = booster.boost(plain, trained(plain))
    with pytest.raises(ValueError) as caught:
        booster.save_lora_as_pretrained(boosted, "nowhere")
    return [*said, str(caught.value)]


def test_what_adapters_cannot_do_is_refused() -> None:
    for dora, unadapted in run_ranks(_refusals, 2):
        assert "DoRA" in dora
        assert "tp_size=1" in dora
        assert "carries no adapters" in unadapted
        assert "booster.enable_lora" in unadapted


def test_linears_that_kernels_read_are_named() -> None:
    config = MambaConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1)
    booster = Booster()
    with pytest.raises(ValueError, match=r"MambaForCausalLM .*exclude_modules=\['out_proj', 'conv1d'\]"):
        booster.enable_lora(MambaForCausalLM(config), lora_config=peft.LoraConfig(target_modules="all-linear"))
    left_out = peft.LoraConfig(target_modules="all-linear", exclude_modules=["out_proj", "conv1d"])
    adapted = booster.enable_lora(MambaForCausalLM(config), lora_config=left_out)
    names = [name for name, param in adapted.named_parameters() if param.requires_grad]
    assert any("in_proj.lora_A" in name for name in names)
    assert not any("out_proj" in name for name in names)


def _dropout(rank: int, world: int) -> list[torch.Tensor]:
    """Gradients of the adapters that every rank holds whole, with dropout in front of all adapters."""
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=2))
    model = booster.enable_lora(
        zoo.build("llama-causal-lm", dtype=torch.float32, **TWO), lora_config=adapters(LLAMA, lora_dropout=0.4)
    )
    boosted, optimizer, *_ = booster.boost(model, trained(model))
    perturb_same = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in boosted.parameters():
            if param.requires_grad:
                param.copy_(0.2 * torch.randn(param.shape, generator=perturb_same))
    booster.execute_pipeline(iter([zoo.inputs("llama-causal-lm", batch_size=4)]), boosted, None, optimizer)
    whole = ("q_proj.lora_A", "up_proj.lora_A", "o_proj.lora_B", "down_proj.lora_B")
    gradients = optimizer.gradients()  # type: ignore[union-attr]
    return [gradient for name, gradient in gradients.items() if any(part in name for part in whole)]


def test_dropout_in_front_of_adapters_keeps_whole_ones_alike() -> None:
    one, other = run_ranks(_dropout, 2)
    assert len(one) == 8
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
        assert mine.abs().max() > 0
