"""A script as users of Colossal-AI write it; tests run it as it is."""

import argparse
import json
from contextlib import nullcontext

import colossalai
import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from colossalai.cluster import DistCoordinator
from colossalai.lazy import LazyInitContext
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import HybridAdam
from colossalai.pipeline.stage_manager import PipelineStageManager
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    get_linear_schedule_with_warmup,
)

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT),
    "llama": LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "bert": BertConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    ),
}


class RandomDataset(torch.utils.data.Dataset):
    def __init__(self, model: str, samples: int = 12, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(7)
        self.input_ids = torch.randint(3, 128, (samples, length), generator=generator)
        self.attention_mask = torch.ones_like(self.input_ids)
        for number in range(samples):  # as padding leaves it: every sample of a length of its own
            self.attention_mask[number, length - number % 5 :] = 0
        if model == "bert":
            self.labels = torch.randint(0, 3, (samples,), generator=generator)
        else:
            self.labels = self.input_ids.masked_fill(self.attention_mask == 0, -100)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict:
        return {name: getattr(self, name)[index] for name in ("input_ids", "attention_mask", "labels")}


def move_to_cuda(batch: dict) -> dict:
    device = get_accelerator().get_current_device()
    return {name: value.to(device) for name, value in batch.items()}


def build_model(name: str, config):
    auto = AutoModelForSequenceClassification if name == "bert" else AutoModelForCausalLM
    return auto.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", type=str, default="torch_ddp")
    parser.add_argument("--model", type=str, default="gpt2", choices=list(CONFIGS))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--lazy", action="store_true")
    parser.add_argument("--output", type=str, required=True)
    args = parser.parse_args()

    colossalai.launch_from_torch(seed=42)
    disable_existing_loggers()
    coordinator = DistCoordinator()
    logger = get_dist_logger()

    booster_kwargs = {}
    if args.plugin == "torch_ddp":
        plugin = TorchDDPPlugin()
    elif args.plugin == "torch_fsdp":
        plugin = TorchFSDPPlugin()
    elif args.plugin == "gemini":
        plugin = GeminiPlugin(precision="fp32", initial_scale=2**5, max_norm=1.0)
    elif args.plugin == "low_level_zero":
        plugin = LowLevelZeroPlugin(stage=2, precision="fp32", initial_scale=2**5, max_norm=1.0)
    elif args.plugin == "hybrid_parallel":
        plugin = HybridParallelPlugin(
            tp_size=args.tp,
            pp_size=args.pp,
            num_microbatches=None,
            microbatch_size=1,
            zero_stage=args.zero,
            precision="fp32",
            initial_scale=1,
            max_norm=1.0,
            parallel_output=False,
        )
    else:
        raise ValueError(args.plugin)
    booster = Booster(plugin=plugin, **booster_kwargs)
    assert isinstance(plugin, DPPluginBase) != isinstance(plugin, HybridParallelPlugin)

    with LazyInitContext(default_device=get_accelerator().get_current_device()) if args.lazy else nullcontext():
        model = build_model(args.model, CONFIGS[args.model])
    dataloader = plugin.prepare_dataloader(RandomDataset(args.model), batch_size=2, shuffle=False, drop_last=True)

    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.1,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = HybridAdam(groups, lr=1e-2, eps=1e-4)
    steps = len(dataloader)
    if args.model == "bert":
        lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=steps)
    else:
        lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=steps, warmup_steps=2, eta_min=1e-3)

    def criterion(outputs, inputs):
        return outputs[0]

    model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
        model, optimizer, criterion=criterion, dataloader=dataloader, lr_scheduler=lr_scheduler
    )

    use_pipeline = isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1
    prints = (
        coordinator.is_master()
        if not use_pipeline
        else booster.plugin.stage_manager.is_last_stage(ignore_chunk=True) and booster.plugin.tp_size >= 1
    )
    if use_pipeline:
        assert isinstance(booster.plugin.stage_manager, PipelineStageManager)
        assert len(booster.plugin.pg_mesh.get_ranks_in_group(booster.plugin.pp_group)) == args.pp

    losses = []
    model.train()
    batches = iter(dataloader)
    for _ in range(steps):
        if use_pipeline:
            result = booster.execute_pipeline(
                batches, model, criterion, optimizer, return_loss=True, return_outputs=True
            )
            loss = result["loss"]
            if prints:
                assert result["outputs"]["logits"].shape[0] == 2
        else:
            batch = move_to_cuda(next(batches))
            loss = criterion(model(**batch), batch)
            booster.backward(loss, optimizer)
            loss = loss.detach()
            if not isinstance(plugin, HybridParallelPlugin):
                dist.all_reduce(loss)
                loss /= coordinator.world_size
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
        if prints:
            losses.append(loss.item())
    if prints:
        with open(f"{args.output}.json", "w") as file:
            json.dump({"losses": losses, "lr": lr_scheduler.get_last_lr()[0]}, file)
    logger.info(f"{args.plugin} {args.model}: {losses}", ranks=[0])
    booster.save_model(model, args.output, shard=True)
    booster.save_optimizer(optimizer, f"{args.output}-optimizer", shard=True)
    booster.load_optimizer(optimizer, f"{args.output}-optimizer")
    booster.save_model(model, f"{args.output}.bin")
    coordinator.block_all()
    booster.load_model(model, f"{args.output}.bin")


if __name__ == "__main__":
    main()
