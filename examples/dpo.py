"""Direct preference optimisation, as an extension of shardwright's Trainer.

    python examples/dpo.py --tiny
    torchrun --nproc-per-node 4 examples/dpo.py --tiny --tp 2 --pp 2
    torchrun --nproc-per-node 8 examples/dpo.py --model Qwen/Qwen3-0.6B --pp 2 --output trained

DPO learns from pairs of answers, of which one was chosen and one rejected (Rafailov et al., 2023):

    loss = -log sigmoid(beta (log p(chosen) - log p_ref(chosen) - log p(rejected) + log p_ref(rejected)))

where p_ref is the model before training. What Trainer does not know of are two things: a criterion, and the reference,
which is computed once, through the same pipeline, before the first step.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _shared import byte_tokenizer, hybrid_plugin, options, padded, rate, vocabulary
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam
from shardwright.trainer import Log, Trainer
from shardwright.trainer.samples import Encoder
from shardwright.utils import get_current_device

Batch = dict[str, torch.Tensor]


def log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[rows]: of each row's answer, whose tokens are those with a target."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="none")
    return -losses.view(targets.shape[0], -1).sum(-1)


class PreferenceLoss:
    """The criterion. Rows 2n and 2n + 1 of a batch are the chosen and the rejected answer of pair n."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def __call__(self, outputs: Any, batch: Batch) -> torch.Tensor:
        gained = log_probabilities(outputs.logits, batch["targets"]) - batch["reference"]
        return -F.logsigmoid(self.beta * (gained[0::2] - gained[1::2])).mean()


class Pairs(torch.utils.data.Dataset):
    """Pairs of tokenized answers, and what the reference model says of them once that is known."""

    def __init__(self, pairs: Sequence[dict[str, str]], tokenizer: Any, length: int) -> None:
        self.padding = tokenizer.pad_token_id or 0
        self.pairs = [[self._encode(tokenizer, row, kind, length) for kind in ("chosen", "rejected")] for row in pairs]
        if not any(token >= 0 for pair in self.pairs for row in pair for token in row["labels"]):
            raise SystemExit(f"--length {length} ends before the answers begin: nothing would be learned; give more")
        self.reference = torch.zeros(len(pairs), 2)

    @staticmethod
    def _encode(tokenizer: Any, row: dict[str, str], kind: str, length: int) -> dict[str, list[int]]:
        sample = Encoder(tokenizer, length).one({"prompt": row["prompt"], "completion": row[kind]})
        return {"input_ids": list(sample.ids), "labels": list(sample.labels)}

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[int, list[dict[str, list[int]]], torch.Tensor]:
        return index, self.pairs[index], self.reference[index]

    def collate(self, items: Sequence[tuple[int, list[dict[str, list[int]]], torch.Tensor]]) -> Batch:
        batch = padded([row for _, pair, _ in items for row in pair], self.padding)
        batch["targets"] = batch.pop("labels")  # the model is to compute no loss of its own
        batch["pair"] = torch.tensor([index for index, _, _ in items]).repeat_interleave(2)
        return {**batch, "reference": torch.cat([reference for *_, reference in items])}


class DPOTrainer(Trainer):
    @torch.no_grad()
    def note_reference(self, pairs: Pairs) -> None:
        """What the model says before it is trained, on every rank."""
        found = torch.zeros(2, *pairs.reference.shape, device=get_current_device())  # sums over ranks, and how many
        self.model.eval()
        for batch in self.data:
            result = self.booster.execute_pipeline(
                iter([batch]), self.model, self.criterion, return_loss=False, return_outputs=True
            )
            if result["outputs"] is not None:  # on the ranks that have the last stage
                said = log_probabilities(result["outputs"].logits, batch["targets"].to(found.device)).float()
                found[0, batch["pair"][0::2]] = said.view(-1, 2)
                found[1, batch["pair"][0::2]] = 1
        dist.all_reduce(found)
        pairs.reference.copy_((found[0] / found[1].clamp(min=1)).cpu())
        self.model.train()


def preferences(tiny: bool) -> list[dict[str, str]]:
    """Made-up ones prefer answers in lower case."""
    if tiny:
        source = random.Random(0)
        words = [source.choice(("fox", "bird", "river", "stone")) for _ in range(64)]
        return [{"prompt": f"say {word}: ", "chosen": word, "rejected": word.upper()} for word in words]
    import datasets

    rows = datasets.load_dataset("Intel/orca_dpo_pairs", split="train")
    return [{"prompt": row["question"], "chosen": row["chosen"], "rejected": row["rejected"]} for row in rows]


def main(argv: Sequence[str] | None = None) -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--beta", type=rate, default=0.1)
    args = options(__doc__, argv, extra, model="Qwen/Qwen3-0.6B", lr=1e-6)
    if args.microbatches and args.batch_size % args.microbatches:
        raise SystemExit(
            f"--microbatches {args.microbatches} does not divide --batch-size {args.batch_size}, so answers that are "
            "compared would come apart; give a divisor of it"
        )
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        tokenizer = byte_tokenizer()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **vocabulary(tokenizer)))
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model)
    pairs = Pairs(preferences(args.tiny), tokenizer, args.length)

    optimizer: Any = HybridAdam(model.parameters(), lr=args.lr)
    plugin = hybrid_plugin(args)
    dataloader = plugin.prepare_dataloader(
        pairs, batch_size=args.batch_size, shuffle=True, drop_last=False, collate_fn=pairs.collate
    )
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, dataloader=dataloader)
    trainer = DPOTrainer(
        booster,
        model,
        optimizer,
        dataloader,
        total_steps=args.steps,
        directory=args.output or mkdtemp(),
        criterion=PreferenceLoss(args.beta),
        listeners=[Log()],
    )
    trainer.note_reference(pairs)
    trainer.train()
    if args.output:
        booster.save_model(model, str(Path(args.output) / "model"), shard=True)
        if coordinator.is_master():
            tokenizer.save_pretrained(Path(args.output) / "model")


if __name__ == "__main__":
    main()
