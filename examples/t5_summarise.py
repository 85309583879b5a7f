"""Fine-tune T5 to summarise, and let it write a summary.

    python examples/t5_summarise.py --tiny
    torchrun --nproc-per-node 4 examples/t5_summarise.py --tiny --tp 2 --pp 2
    torchrun --nproc-per-node 8 examples/t5_summarise.py --model google-t5/t5-large --tp 2 --output trained

Encoder and decoder are cut into stages like one list of layers. Articles and summaries have lengths of their own, so
batches and microbatches hold unequal numbers of tokens; the loss is the mean over the tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _shared import byte_tokenizer, endless, hybrid_plugin, options, padded, sentences, vocabulary
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam


def articles(tiny: bool) -> list[dict[str, str]]:
    """Made-up ones say in their middle what their summary is."""
    if tiny:
        text = sentences(200)
        return [{"article": " ".join(text[n : n + 2 + n % 2]), "highlights": text[n + 1]} for n in range(len(text) - 2)]
    import datasets

    return list(datasets.load_dataset("abisee/cnn_dailymail", "3.0.0", split="train[:20000]"))


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv, model="google-t5/t5-small", lr=3e-4, tiny={"length": 128})
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        tokenizer = byte_tokenizer()
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
        config = T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes, **vocabulary(tokenizer))
        model: Any = T5ForConditionalGeneration(config)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(args.model)

    def encode(row: dict[str, str]) -> dict[str, list[int]]:
        cut = {"truncation": True, "max_length": args.length}
        ids = tokenizer(f"summarize: {row['article']}", **cut)["input_ids"]
        summary = tokenizer(row["highlights"], **cut)["input_ids"]
        return {"input_ids": ids, "labels": summary}

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
        sources = padded([{"input_ids": row["input_ids"], "labels": []} for row in rows], tokenizer.pad_token_id)
        summaries = padded([{"input_ids": row["labels"], "labels": row["labels"]} for row in rows], 0)
        return {**sources, "labels": summaries["labels"]}

    plugin = hybrid_plugin(args)
    optimizer = HybridAdam(model.parameters(), lr=args.lr)
    dataloader = plugin.prepare_dataloader(
        [encode(row) for row in articles(args.tiny)],
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
    )
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, dataloader=dataloader)

    batches = endless(dataloader)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(batches, model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if coordinator.is_last_process():
            print(f"step {step}: loss {result['loss'].item():.4f}")

    if args.pp == 1:  # a pipeline trains; what it saves is for transformers' generate
        prompt = tokenizer("summarize: " + " ".join(sentences(3, seed=1)), return_tensors="pt").to(model.device)
        written = model.eval().generate(prompt["input_ids"], max_new_tokens=24, do_sample=False)
        coordinator.print_on_master(f"summary: {tokenizer.decode(written[0], skip_special_tokens=True)!r}")
    if args.output:
        booster.save_model(model, args.output, shard=True)
        if coordinator.is_master():
            tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
