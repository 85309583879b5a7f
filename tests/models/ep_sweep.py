"""Spread the experts of every causal language model of transformers that has some over two ranks, train three steps,
and compare losses, gradients and weights with the whole model.

python -m tests.models.ep_sweep                      # all that have experts, about ten minutes on two cores
python -m tests.models.ep_sweep mixtral gpt_oss      # some
"""

from __future__ import annotations

import argparse
import logging
import traceback
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer.layer.parallel_module import native_class
from shardwright.testing import RankError, adamw, compare_models, keep_float64, run_ranks
from tests.models import tiny_causal_lm as tiny

TOLERANCE = 1e-8  # some models cast to single precision in ways that keep_float64 does not see
STEPS = 3


def families() -> list[str]:
    """Model types with a module that is named after experts."""
    found = []
    for model_type in tiny.causal_language_models():
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(tiny.config(model_type))
        except Exception:
            continue
        if any("Expert" in native_class(module).__name__ for module in model.modules()):
            found.append(model_type)
    return found


def batch_of(model: nn.Module, step: int) -> dict[str, Any]:
    """Four samples of different lengths, labels for a part of them; a rank takes two."""
    generator = torch.Generator().manual_seed(step)
    text: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    ids = torch.randint(5, min(text.vocab_size, 99), (4, 16), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 12:] = mask[2, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :5] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def rows(batch: dict[str, Any], rank: int) -> dict[str, Any]:
    return {**{name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}, "use_cache": False}


def verify(rank: int, world: int, model_type: str, plugin: dict[str, Any]) -> dict[str, Any]:
    """What one rank has to say about a model type."""
    logging.disable(logging.WARNING)
    try:
        with keep_float64():
            reference = tiny.build(model_type)
            torch.manual_seed(7)
            reference(**rows(batch_of(reference, 0), 0)).loss.backward()
            reference.zero_grad()
    except Exception as error:
        return {"status": "not built", "why": _line(error)}
    model = tiny.build(model_type)
    booster = Booster(plugin=HybridParallelPlugin(**{"precision": "fp32", "ep_size": 2, **plugin}))
    try:
        model, optimizer, *_ = booster.boost(model, adamw(model))
    except ValueError as error:
        return {"status": "refused", "why": _line(error)}
    trainer = adamw(reference)
    try:
        for step in range(STEPS):
            _step(rank, reference, trainer, booster, model, optimizer, batch_of(reference, step))
    except Exception as error:
        return {"status": "wrong", "why": _line(error), "trace": traceback.format_exc()[-1500:]}
    return {"status": "verified"}


def _step(rank: int, reference: Any, trainer: Any, booster: Any, model: Any, optimizer: Any, batch: Any) -> None:
    trainer.zero_grad()
    optimizer.zero_grad()
    mesh = booster.plugin.mesh
    replica, replicas = mesh.coordinate("dp"), mesh.size("dp")
    with keep_float64():
        losses = []
        for other in range(replicas):
            torch.manual_seed(7)
            losses.append(reference(**rows(batch, other)).loss)
            (losses[-1] / replicas).backward()
        torch.manual_seed(7)
        loss = model(**rows(batch, replica)).loss
        booster.backward(loss, optimizer)
    gradients = optimizer.gradients()
    failed: str | None = None
    try:
        compare_models(
            reference,
            model,
            coordinate=mesh.coordinate,
            losses=([losses[replica].item()], [loss.item()]),
            gradients=gradients,
            gradient_floor=1e-3,
            tolerance=TOLERANCE,
        )
    except Exception as error:
        failed = str(error)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, failed)
    if any(everywhere):
        raise AssertionError(next(text for text in everywhere if text))
    trainer.step()
    optimizer.step()


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for name in options.names or families():
        plugin = {"tp_size": options.tp} if options.tp > 1 else {}
        try:
            said = run_ranks(verify, 2 * options.tp, name, plugin, timeout=100)
            result = next((one for one in said if one["status"] != "verified"), said[0])
        except (RankError, TimeoutError) as error:
            slow = "not all of" in str(error)
            result = {"status": "too slow" if slow else "wrong", "why": _line(error)}
        counts[result["status"]] += 1
        print(f"{name:24} {result['status']:10} {result.get('why', '')}", flush=True)
        if options.trace and "trace" in result:
            print(result["trace"])
    print(", ".join(f"{count} {status}" for status, count in counts.items()))


if __name__ == "__main__":
    main()
