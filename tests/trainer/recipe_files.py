"""A recipe that works, its files, and sentences to train on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = ["the", "a", "fox", "bird", "sees", "runs", "to", "near", "green", "tree", "over", "lake", "quietly"]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, 12))) for _ in range(count)]


def write_text(path: Path, count: int = 60) -> Path:
    path.write_text("".join(json.dumps({"text": line, "id": at}) + "\n" for at, line in enumerate(sentences(count))))
    return path


def write_chat(path: Path, count: int = 40) -> Path:
    lines = zip(sentences(count, 1), sentences(count, 2), strict=True)
    rows = (
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in lines
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """Plain values of a recipe on `train.jsonl` of a folder, which is written."""
    path = write_text(folder / "train.jsonl")
    return {
        "model": {"config": dict(LLAMA)},
        "tokenizer": "bytes",
        "data": {"path": str(path), "text": "text", "max_length": 64},
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "seed": 1,
        "save_strategy": "no",
    } | changes
