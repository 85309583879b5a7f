"""What the examples share: options of the command line, the plugin that they make, and text to train on."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from shardwright.plugins import HybridParallelPlugin
from shardwright.trainer.tokenizer import byte_tokenizer
from shardwright.utils.options import count, directory, pretrained, rate, refused_in_a_line

# What --tiny makes of options that are not given: a few steps, in the format that a CPU is fastest in.
TINY = {"steps": 8, "batch_size": 4, "length": 32, "lr": 3e-3, "precision": "fp32"}


def options(
    description: str | None,
    argv: Sequence[str] | None = None,
    extra: argparse.ArgumentParser | None = None,
    tiny: dict[str, Any] | None = None,
    **defaults: Any,
) -> argparse.Namespace:
    """The options that every example has, and those of `extra`, which is a parser without help. `defaults` and, under
    --tiny, `tiny` are the example's own defaults.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[] if extra is None else [extra],
    )
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights and made-up data")
    parser.add_argument("--model", type=pretrained, help="name on the hub, or directory (%(default)s)")
    parser.add_argument("--steps", type=count, default=500)
    parser.add_argument("--batch-size", type=count, default=8, help="samples of one data-parallel rank and step")
    parser.add_argument("--length", type=count, default=512, help="tokens of a sample")
    parser.add_argument("--lr", type=rate, default=5e-5)
    parser.add_argument("--output", type=directory, help="directory for the trained model; left out: it is not saved")
    layout = parser.add_argument_group("layout (what is left of the ranks is data parallel)")
    layout.add_argument("--tp", type=count, default=1, help="ranks that share every layer")
    layout.add_argument("--pp", type=count, default=1, help="ranks that hold successive layers")
    layout.add_argument("--microbatches", type=count, help="left out: two for each stage of a pipeline")
    layout.add_argument("--zero", type=int, default=1, choices=(0, 1, 2, 3), help="ZeRO stage")
    layout.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp16"))
    given = parser.parse_known_args(argv)[0]
    if given.tiny and given.model and "model" not in (tiny or {}):
        parser.error(f"--model {given.model}: --tiny makes a small model of its own; leave out one of them")
    parser.set_defaults(**defaults)
    if given.tiny:
        parser.set_defaults(**{**TINY, **(tiny or {})})
    return parser.parse_args(argv)


def hybrid_plugin(args: argparse.Namespace, **more: Any) -> HybridParallelPlugin:
    """The plugin of the layout that was asked for."""
    chosen = {
        "tp_size": args.tp,
        "pp_size": args.pp,
        "num_microbatches": args.microbatches or (2 * args.pp if args.pp > 1 else 1),
        "zero_stage": args.zero,
        "precision": args.precision,
        "max_norm": 1.0,
    }
    with refused_in_a_line():
        return HybridParallelPlugin(**{**chosen, **more})


def endless(dataloader: Iterable[Any]) -> Iterator[Any]:
    """Its batches, pass after pass."""
    while True:
        yield from dataloader


def vocabulary(tokenizer: Any) -> dict[str, Any]:
    """What a config has to know of a tokenizer."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    return {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **ends}


def sentences(count: int, seed: int = 0) -> list[str]:
    """Made-up text with something to learn: few words, and which of them may follow which."""
    source = random.Random(seed)
    nouns, verbs = ("fox", "bird", "river", "stone", "child"), ("sees", "follows", "hears", "finds")

    def sentence() -> str:
        subject, verb, thing, place = (source.choice(words) for words in (nouns, verbs, nouns, nouns))
        return f"the {subject} {verb} the {thing} near the {place} ."

    return [sentence() for _ in range(count)]


def wikitext() -> Iterable[str]:
    """The training part of WikiText-2, from the hub."""
    import datasets

    return datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="train")["text"]


def text_blocks(tokenizer: Any, texts: Iterable[str], length: int) -> list[dict[str, torch.Tensor]]:
    """The texts one after the other, cut into blocks of `length` tokens."""
    if length < 2:
        raise SystemExit(f"--length {length}: a block's first token is not predicted; give at least 2")
    ids = [token for text in texts if text for token in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    blocks = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [{"input_ids": block, "labels": block} for block in blocks]


def padded(rows: Sequence[dict[str, list[int]]], padding: int) -> dict[str, torch.Tensor]:
    """Rows of `input_ids` and `labels` of different lengths as one batch."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([[*row[name], *[filler] * (longest - len(row[name]))] for row in rows])

    mask = torch.tensor([[n < len(row["input_ids"]) for n in range(longest)] for row in rows]).long()
    return {"input_ids": filled("input_ids", padding), "attention_mask": mask, "labels": filled("labels", -100)}


__all__ = [
    "byte_tokenizer",
    "count",
    "directory",
    "endless",
    "hybrid_plugin",
    "options",
    "padded",
    "rate",
    "refused_in_a_line",
    "sentences",
    "text_blocks",
    "vocabulary",
    "wikitext",
]
