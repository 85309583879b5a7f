"""What documents of Colossal-AI walk through, written with the imports of this package: each does here what it says
there, and the numbers are those of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import shardwright
from shardwright.accelerator import get_accelerator
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import ShardConfig, ShardFormer
from shardwright.shardformer.layer import Linear1D_Col, Linear1D_Row
from shardwright.shardformer.policies.base_policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)
from shardwright.testing import run_ranks

SAMPLES = 16


def bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    torch.manual_seed(3)
    return BertForSequenceClassification(config)


def pairs() -> list[dict[str, torch.Tensor]]:
    """Sentences of ragged lengths; a class can be read off the first word."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for index in range(SAMPLES):
        length = int(torch.randint(6, 13, (), generator=generator))
        ids = torch.randint(5, 120, (12,), generator=generator)
        ids[1] = 7 if index % 2 else 90
        mask = (torch.arange(12) < length).long()
        data.append({"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor(index % 2)})
    return data


def batches(size: int = 4) -> DataLoader[Any]:
    return DataLoader(pairs(), batch_size=size)  # type: ignore[arg-type]


def plain(steps: int = 4) -> list[float]:
    """Losses of one process."""
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return [trained(model, optimizer, batch) for batch in list(batches())[:steps]]


def trained(model: nn.Module, optimizer: Any, batch: dict[str, torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def close(losses: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain(len(losses))), rtol=1e-5, atol=1e-5)


# --- the tutorial of one-dimensional tensor parallelism ---


class MLP(nn.Module):
    def __init__(self, dim: int = 256) -> None:
        super().__init__()
        self.dense_1 = nn.Linear(dim, dim * 4)
        self.activation = nn.GELU()
        self.dense_2 = nn.Linear(dim * 4, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.dense_2(self.activation(self.dense_1(x))))


def one_dimension(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    model = MLP()
    group = dist.new_group(list(range(world_size)))
    model.dense_1 = Linear1D_Col.from_native_module(model.dense_1, process_group=group, gather_output=False)
    model.dense_2 = Linear1D_Row.from_native_module(model.dense_2, process_group=group, parallel_input=True)
    printed = [
        f"Weight of the first linear layer: {model.dense_1.weight.transpose(0, 1).shape}",
        f"Weight of the second linear layer: {model.dense_2.weight.transpose(0, 1).shape}",
    ]
    inside: list[torch.Tensor] = []
    model.dense_1.register_forward_hook(lambda module, args, output: inside.append(output))
    x = torch.randn(16, 256)
    dist.broadcast(x, src=0)
    y = model(x)
    return [
        *printed,
        f"Output of the first linear layer: {inside[0].shape}",
        f"Output of the second linear layer: {y.shape}",
    ]


def test_the_tutorial_prints_its_shapes() -> None:
    for printed in run_ranks(one_dimension, 2):
        assert printed == [
            "Weight of the first linear layer: torch.Size([256, 512])",
            "Weight of the second linear layer: torch.Size([512, 256])",
            "Output of the first linear layer: torch.Size([16, 512])",
            "Output of the second linear layer: torch.Size([16, 256])",
        ]


# --- the three usages of ShardFormer ---


class MyPolicy(Policy):
    """A policy of one's own, with the class of the layers as its key."""

    def config_sanity_check(self) -> None:
        pass

    def preprocess(self) -> nn.Module:
        return self.model

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        ranks = self.shard_config.tensor_parallel_size
        columns = ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")
        rows = ("attention.output.dense", "output.dense")
        return {
            "BertLayer": ModulePolicyDescription(
                attribute_replacement={
                    "attention.self.all_head_size": self.model.config.hidden_size // ranks,
                    "attention.self.num_attention_heads": self.model.config.num_attention_heads // ranks,
                },
                sub_module_replacement=[
                    *(SubModuleReplacementDescription(suffix=name, target_module=Linear1D_Col) for name in columns),
                    *(SubModuleReplacementDescription(suffix=name, target_module=Linear1D_Row) for name in rows),
                ],
            )
        }

    def postprocess(self) -> nn.Module:
        return self.model


def usages(rank: int, world_size: int) -> None:
    ShardFormer.init_distributed()
    # By itself, with a loop of one's own.
    shard_former = ShardFormer(shard_config=ShardConfig(enable_tensor_parallelism=True))
    sharded, _ = shard_former.optimize(bert())
    sharded = sharded.train()
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    loader = shard_former.shard_dataset(pairs(), batch_size=4)  # type: ignore[arg-type]
    close([trained(sharded, optimizer, batch) for batch in loader])
    # Through the booster.
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, precision="fp32")
    boosted_losses(plugin)
    # With a policy of one's own, either way.
    sharded, shared = ShardFormer(ShardConfig()).optimize(bert(), policy=MyPolicy())
    assert shared == []
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    close([trained(sharded, optimizer, batch) for batch in batches()])
    boosted_losses(HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", custom_policy=MyPolicy()))


def boosted_losses(plugin: HybridParallelPlugin) -> None:
    booster = Booster(plugin=plugin)
    model: Any = bert()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    close(losses)


def test_three_usages_of_shardformer() -> None:
    run_ranks(usages, 2, timeout=60)


# --- fine-tuning BERT ---


def fine_tune(rank: int, world_size: int) -> list[float]:
    """Stages over two ranks, a step per batch, the classes that the last stage finds, told to all."""
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    plugin = HybridParallelPlugin(
        tp_size=1,
        pp_size=2,
        num_microbatches=None,
        microbatch_size=1,
        enable_all_optimization=True,
        zero_stage=1,
        precision="fp32",
        initial_scale=1,
    )
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(pairs(), batch_size=4, shuffle=False, drop_last=True)  # type: ignore[arg-type]
    model: Any = bert()
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(part in n for part in no_decay)],
            "weight_decay": 0.01,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(part in n for part in no_decay)],
            "weight_decay": 0.01,
        },
    ]
    optimizer: Any = HybridAdam(groups, lr=1e-3, eps=1e-8)
    total = len(loader) * 6
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=10**9)

    def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
        return outputs.loss

    model, optimizer, criterion_, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=criterion, lr_scheduler=lr_scheduler
    )
    is_last = booster.plugin.stage_manager.is_last_stage(ignore_chunk=True)
    losses: list[float] = []
    for _ in range(total // len(loader)):
        model.train()
        optimizer.zero_grad()
        batches_left = iter(loader)
        for _ in range(len(loader)):
            outputs = booster.execute_pipeline(batches_left, model, criterion_, optimizer, return_loss=True)
            if is_last:
                losses.append(float(outputs["loss"]))
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
    model.eval()
    right = 0
    for batch in loader:
        batch = {key: value.to(get_accelerator().get_current_device()) for key, value in batch.items()}
        outputs = booster.execute_pipeline(iter([batch]), model, criterion_, return_loss=True, return_outputs=True)
        found: list[Any] = [None]
        if is_last:
            found = [outputs["outputs"]["logits"].argmax(-1)]
        dist.broadcast_object_list(
            found, src=plugin.pg_mesh.get_ranks_in_group(plugin.pp_group)[-1], group=plugin.pp_group
        )
        right += int((found[0] == batch["labels"]).sum())
    assert right == SAMPLES, f"{right} of {SAMPLES}"
    coordinator.block_all()
    return losses


def test_fine_tuning_bert() -> None:
    first, last = run_ranks(fine_tune, 2, timeout=60)
    assert first == []
    close(last[:4])
    assert last[-1] < 0.7 * last[0]
