"""Split the sequences of every causal language model of transformers over two ranks and compare loss and gradients with
one process.

python -m tests.models.sp_sweep --json sweep.jsonl            # all, in both modes; begins again where it was ended
python -m tests.models.sp_sweep --probe                       # only whether a model is taken, in one process
python -m tests.models.sp_sweep llama bloom t5                # some, encoder-decoders too
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.layer_axis import LayerFacts
from shardwright.plugins.hybrid.sequence import AXIS_MODES, probe_mode
from shardwright.testing import RankError, compare_models, keep_float64, run_ranks
from tests.models import tiny_causal_lm as tiny

TOLERANCE = 1e-8  # some models cast to single precision in ways that keep_float64 does not see
_WINDOW = 6
_LENGTH = 19  # which two ranks pad


def build(model_type: str) -> nn.Module:
    """With windows that tokens feel, where there are any."""
    found = tiny.config(model_type)
    text = found.get_text_config()
    windows = text is found and isinstance(getattr(found, "sliding_window", None), int)
    return tiny.build(model_type, {"sliding_window": _WINDOW} if windows else None)


def inputs(model: nn.Module) -> dict[str, Any]:
    """Sequences of several lengths, labels for a part of them, positions as the mask counts them."""
    generator = torch.Generator().manual_seed(3)
    text: Any = model.config.get_text_config()
    ids = torch.randint(5, min(text.vocab_size, 99), (3, _LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :5] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


def probe(rank: int, world: int, model_types: list[str]) -> list[dict[str, Any]]:
    """Whether models are taken."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results = []
    for model_type in model_types:
        try:
            model = build(model_type)
        except Exception as error:
            results.append({"model_type": model_type, "mode": "", "status": "not built", "why": _line(error)})
            continue
        for mode in AXIS_MODES:
            started = time.monotonic()
            result = {"model_type": model_type, "mode": mode, "status": "taken", "why": ""}
            try:
                result |= how(probe_mode(mode, model))
            except ValueError as error:
                result |= {"status": "refused", "why": _line(error)}
            except Exception as error:
                result |= {"status": "failed", "why": _line(error), "trace": traceback.format_exc()[-3000:]}
            results.append(result | {"seconds": round(time.monotonic() - started, 1)})
    return results


def how(facts: Any) -> dict[str, Any]:
    """What is split: "batch", or "layers" with the number of modules whose attention is traded, or that are whole."""
    if not isinstance(facts, LayerFacts):
        return {"split": "batch"}
    return {"split": "layers", "traded": len(facts.plan.traded), "whole": len(facts.plan.whole), "loss": facts.loss}


def verify(rank: int, world: int, model_type: str, modes: list[str]) -> list[dict[str, Any]]:
    """What one rank has to say about a model type."""
    logging.disable(logging.WARNING)
    try:
        with keep_float64():
            reference = build(model_type)
            untouched = copy.deepcopy(reference)
            batch = inputs(reference)
            torch.manual_seed(7)
            expected = reference(**batch).loss
            expected.backward()
    except Exception as error:
        return [{"mode": mode, "status": "not built", "why": _line(error)} for mode in modes]
    results = []
    for mode in modes:
        result = _compare(reference, copy.deepcopy(untouched), batch, expected.detach(), mode)
        results.append({"mode": mode, **result})
    return results


def _compare(
    reference: nn.Module, model: Any, batch: dict[str, Any], expected: torch.Tensor, mode: str
) -> dict[str, Any]:
    arguments = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode, "sp_size": 2}
    plugin = HybridParallelPlugin(precision="fp32", **arguments)
    booster = Booster(plugin=plugin)
    with keep_float64():
        try:
            model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except ValueError as error:
            return {"status": "refused", "why": _line(error)}
        try:
            torch.manual_seed(7)
            try:
                loss = model(**batch).loss
            except ValueError as error:
                if "counts positions by the mask" not in str(error):
                    raise
                mask = batch["attention_mask"]
                batch = {**batch, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
                reference.zero_grad()
                expected = reference(**batch).loss
                expected.backward()
                loss = model(**batch).loss
            booster.backward(loss, optimizer)
        except Exception as error:
            return {"status": "failed", "why": _line(error), "trace": traceback.format_exc()[-3000:]}
    report = compare_models(
        reference,
        model,
        coordinate=plugin.mesh.coordinate,
        losses=(expected.detach(), loss.detach()),
        gradients=optimizer.gradients(),
        weights=False,
        tolerance=TOLERANCE,
        check=False,
    )
    try:
        report.check()
    except AssertionError as error:
        return {"status": "wrong", "why": _line(error)}
    return {"status": "verified", "why": "", **how(plugin._sequences)}


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    causes = re.search(r"sequences split \((.*)\); use", text)
    if causes:
        return causes[1][:300]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def run(model_type: str, modes: list[str], timeout: float = 60) -> list[dict[str, Any]]:
    started = time.monotonic()
    try:
        ranks = run_ranks(verify, 2, model_type, modes, timeout=timeout)
        results = [
            next((one for one in each if one["status"] != "verified"), each[0]) for each in zip(*ranks, strict=True)
        ]
    except RankError as error:
        if len(modes) > 1:  # one may have taken the other with it
            return [result for mode in modes for result in run(model_type, [mode], timeout)]
        late = time.monotonic() - started > timeout
        why = next((line for line in str(error).splitlines() if "Error" in line), str(error)[:160])
        why = f"no result within {timeout:.0f} s" if late else " ".join(why.split())[:300]
        results = [{"mode": mode, "status": "failed", "why": why, "trace": str(error)[-3000:]} for mode in modes]
    seconds = round(time.monotonic() - started, 1)
    return [{"model_type": model_type, "seconds": seconds, **result} for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="model types of transformers; all when none is given")
    parser.add_argument("--mode", choices=AXIS_MODES, action="append", help="one mode; both when none is given")
    parser.add_argument("--probe", action="store_true", help="only ask whether models are taken")
    parser.add_argument("--json", type=Path, help="one JSON line per model and mode; what it holds is not run again")
    parser.add_argument("--trace", action="store_true", help="print where a model failed")
    options = parser.parse_args()
    modes = options.mode or list(AXIS_MODES)
    types = options.model_types or sorted(tiny.causal_language_models())
    results: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        results = [json.loads(line) for line in options.json.read_text().splitlines()]
    done = {(result["model_type"], result["mode"]) for result in results}
    for model_type in types:
        missing = [mode for mode in modes if not {(model_type, mode), (model_type, "")} & done]
        if not missing:
            continue
        found = probe(0, 1, [model_type]) if options.probe else run(model_type, missing)
        for result in found:
            trace = result.pop("trace", "")
            line = json.dumps(result)
            print(line + (f"\n{trace}" if options.trace else ""), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(line + "\n")
            results.append(result)
    for mode in modes:
        print(summary(results, mode))


def summary(results: list[dict[str, Any]], mode: str) -> str:
    counts = Counter(result["status"] for result in results if result["mode"] in (mode, ""))
    built = sum(counts.values()) - counts["not built"]
    return f"{mode}: " + ", ".join(f"{number} {status}" for status, number in counts.items()) + f"; of {built} built"


if __name__ == "__main__":
    main()
