"""Train a model of your own, not one of transformers, with tensor parallelism, a pipeline and ZeRO.

    python examples/custom_transformer.py --tiny
    torchrun --nproc-per-node 4 examples/custom_transformer.py --tiny --tp 2 --pp 2
    torchrun --nproc-per-node 8 examples/custom_transformer.py --tp 2 --pp 2 --zero 1 --output weights
    torchrun --nproc-per-node 2 examples/custom_transformer.py --tiny --tp 2 --policy auto

The model is plain torch. A policy says in a dozen lines which of its linears belong together and where its layers are;
with `--policy auto` even that is found out, and tried on a small copy first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _shared import byte_tokenizer, endless, hybrid_plugin, options, sentences, text_blocks, wikitext
from torch import nn

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.shardformer import Plan, Policy


class Block(nn.Module):
    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] in and out."""
        normed = self.before(x)
        # -1 heads: under tensor parallelism a rank has some of them
        heads = [
            of(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for of in (self.query, self.key, self.value)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.mix(attended)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Speller(nn.Module):
    def __init__(self, letters: int, width: int, layers: int, head_size: int, length: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, head_size) for _ in range(layers))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.letters(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))


class SpellerPolicy(Policy):
    layer_lists = ("blocks",)  # where a pipeline may cut

    def plan(self) -> Plan:
        first = {f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "up")}
        second = {f"blocks.*.{name}": "rowwise" for name in ("mix", "down")}
        return Plan({**first, **second, "letters": "vocab_embedding", "scores": "vocab_head"}, "SpellerPolicy")


def next_letter(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """The criterion: execute_pipeline calls it with what the model returned and what it was given."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def main(argv: Sequence[str] | None = None) -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--policy", choices=("written", "auto"), default="written")
    args = options(__doc__, argv, extra, lr=3e-4)
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    tokenizer = byte_tokenizer()
    width, layers = (64, 4) if args.tiny else (768, 12)
    model: Any = Speller(len(tokenizer), width, layers, head_size=width // 4 if args.tiny else 64, length=args.length)
    dataset = text_blocks(tokenizer, sentences(100) if args.tiny else wikitext(), args.length)

    plugin = hybrid_plugin(
        args,
        custom_policy="auto" if args.policy == "auto" else SpellerPolicy(),
        # what a batch looks like, which nobody could guess from a model that is not of transformers
        example_inputs={name: tensor.expand(4, -1) for name, tensor in dataset[0].items()},
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, dataloader=dataloader)
    coordinator.print_on_master(plugin.layout)

    batches = endless(dataloader)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(batches, model, next_letter, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if coordinator.is_last_process():
            print(f"step {step}: loss {result['loss'].item():.4f}")

    if args.output:
        booster.save_model(model, args.output, shard=True)


if __name__ == "__main__":
    main()
