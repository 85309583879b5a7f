"""Fine-tune Whisper to write down what is said.

    python examples/whisper_transcribe.py --tiny
    torchrun --nproc-per-node 4 examples/whisper_transcribe.py --tiny --tp 2 --pp 2
    torchrun --nproc-per-node 8 examples/whisper_transcribe.py --model openai/whisper-medium --zero 2 --output trained

With --tiny the "speech" is a melody of three notes and the text their names, through Whisper's own feature extractor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from _shared import byte_tokenizer, endless, hybrid_plugin, options, padded, vocabulary
from transformers import (
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam

RATE = 16_000  # samples of sound per second
NOTES = {"do": 262.0, "re": 294.0, "mi": 330.0, "so": 392.0}


def melodies() -> list[tuple[Any, str]]:
    """One second of sound each, and its text."""
    time = torch.arange(RATE // 3) / RATE
    tones = {name: torch.sin(2 * math.pi * pitch * time) for name, pitch in NOTES.items()}
    return [(torch.cat([tones[n] for n in names]).numpy(), " ".join(names)) for names in product(NOTES, repeat=3)]


def speech() -> list[tuple[Any, str]]:
    """Callers of a bank, from the hub."""
    import datasets

    rows = datasets.load_dataset("PolyAI/minds14", "en-US", split="train")
    rows = rows.cast_column("audio", datasets.Audio(sampling_rate=RATE))
    return [(row["audio"]["array"], row["english_transcription"]) for row in rows]


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv, model="openai/whisper-small", lr=1e-5)
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        tokenizer, extractor = byte_tokenizer(), WhisperFeatureExtractor(feature_size=20, chunk_length=1)
        sizes = {"d_model": 64, "num_mel_bins": 20, "max_source_positions": 50, "max_target_positions": 32}
        layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 0}
        begins = {"begin_suppress_tokens": None, "suppress_tokens": None}
        config = WhisperConfig(**sizes, **layers, **heads, **begins, **vocabulary(tokenizer))
        model: Any = WhisperForConditionalGeneration(config)
        recordings = melodies()
    else:
        processor = AutoProcessor.from_pretrained(args.model)
        tokenizer, extractor = processor.tokenizer, processor.feature_extractor
        model = AutoModelForSpeechSeq2Seq.from_pretrained(args.model)
        recordings = speech()

    def collate(rows: list[tuple[Any, str]]) -> dict[str, torch.Tensor]:
        sounds = extractor([sound for sound, _ in rows], sampling_rate=RATE, return_tensors="pt")
        texts = [tokenizer(text)["input_ids"] for _, text in rows]
        labels = padded([{"input_ids": ids, "labels": ids} for ids in texts], 0)["labels"]
        return {"input_features": sounds["input_features"], "labels": labels}

    plugin = hybrid_plugin(args)
    optimizer = HybridAdam(model.parameters(), lr=args.lr)
    dataloader = plugin.prepare_dataloader(
        recordings, batch_size=args.batch_size, shuffle=True, drop_last=True, collate_fn=collate
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

    if args.output:
        booster.save_model(model, args.output, shard=True)
        if coordinator.is_master():
            tokenizer.save_pretrained(args.output)
            extractor.save_pretrained(args.output)


if __name__ == "__main__":
    main()
