"""Shard every causal language model of transformers over two ranks and compare loss and gradients with the whole model.

python -m tests.models.tp_sweep --write docs/models.md        # all, about half an hour on two cores
python -m tests.models.tp_sweep llama opt mamba               # some
python -m tests.models.tp_sweep --sequence split_gather       # with sequences split over the ranks
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.shardformer import ModelSharder, ShardConfig
from shardwright.shardformer.sequence import AlongTensor
from shardwright.spec import get_spec
from shardwright.testing import RankError, compare_models, keep_float64, run_ranks
from tests.models import tiny_causal_lm as tiny

TOLERANCE = 1e-8  # some models cast to single precision in ways that keep_float64 does not see
FULLY = 0.75  # share of the parameters
MODES = {"split_gather": AlongTensor(), "ring": AlongTensor(ring=True)}


def verify(
    rank: int,
    world_size: int,
    model_type: str,
    settings: Mapping[str, Any] | None = None,
    sequence: AlongTensor | None = None,
) -> dict[str, Any]:
    """What one rank has to say about a model type.

    sequence    how sequences are split over the ranks, if they are to be
    """
    logging.disable(logging.WARNING)
    try:
        with keep_float64():
            reference = tiny.build(model_type, settings)
            batch = tiny.inputs(reference)
            torch.manual_seed(7)
            expected = reference(**batch).loss
            expected.backward()
    except Exception as error:
        return {"status": "not built", "why": _line(error)}
    model = tiny.build(model_type, settings)
    try:
        sharder = ModelSharder(model, None, ShardConfig(make_vocab_size_divisible_by=8), sequence)
        with keep_float64():
            sharder.shard()
    except ValueError as error:
        return {"status": "refused", "why": _line(error)}
    policy = sharder.policy
    findings = getattr(policy, "findings", None)
    result: dict[str, Any] = {
        "policy": type(policy).__name__
        if findings is None
        else ("transformers' plan" if getattr(reference, "tp_plan", None) else "names"),
        "dropped": [] if findings is None else findings.dropped,
    }
    if sharder.split is not None:
        result["whole"] = len(sharder.split.whole)  # modules that look at whole sequences and return parts
    model = sharder.model
    try:
        with keep_float64():
            torch.manual_seed(7)
            loss = model(**batch).loss
            loss.backward()
    except Exception as error:
        return result | {"status": "failed", "why": _line(error), "trace": traceback.format_exc()[-1500:]}
    sync_shared_gradients(model.parameters(), dist.group.WORLD)
    report = compare_models(
        reference, model, coordinate=rank, losses=(expected.detach(), loss.detach()), tolerance=TOLERANCE, check=False
    )
    try:
        report.check()
    except AssertionError as error:
        return result | {"status": "wrong", "why": _line(error)}
    specs = [get_spec(param) for param in model.parameters()]
    sizes = [(torch.Size(spec.full_shape).numel(), spec.is_sharded) for spec in specs if spec is not None]
    share = sum(size for size, sharded in sizes if sharded) / sum(size for size, _ in sizes)
    return result | {"status": "verified", "share": share}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def run(model_type: str, timeout: float = 100, sequence: AlongTensor | None = None) -> dict[str, Any]:
    started = time.monotonic()
    try:
        results = run_ranks(verify, 2, model_type, None, sequence, timeout=timeout)
        result = next((one for one in results if one["status"] != "verified"), results[0])
    except RankError as error:
        late = time.monotonic() - started > timeout
        why = next((line for line in str(error).splitlines() if "Error" in line), str(error)[:160])
        result = {
            "status": "failed",
            "why": f"no result within {timeout:.0f} s" if late else " ".join(why.split())[:160],
        }
    return {"model_type": model_type, "seconds": round(time.monotonic() - started, 1), **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="model types of transformers; all when none is given")
    parser.add_argument("--write", type=Path, help="file for the table")
    parser.add_argument(
        "--json", type=Path, help="file for one JSON line per model; types that it holds already are not run again"
    )
    parser.add_argument("--sequence", choices=MODES, help="split sequences over the ranks too")
    options = parser.parse_args()
    known = tiny.causal_language_models()
    done = {}
    if options.json and options.json.exists():
        done = {line["model_type"]: line for line in map(json.loads, options.json.read_text().splitlines())}
    results = []
    for model_type in options.model_types or known:
        result = done.get(model_type) or run(model_type, sequence=MODES.get(options.sequence))
        results.append(result)
        shown = {key: value for key, value in result.items() if key != "trace"}
        print(json.dumps(shown), flush=True)
        if not options.write and "trace" in result:
            print(result["trace"])
        if options.json and model_type not in done:
            with options.json.open("a") as file:
                file.write(json.dumps(shown) + "\n")
    print(summary(results))
    if options.write:
        options.write.write_text(table(results, known))


def summary(results: list[dict[str, Any]]) -> str:
    built = [result for result in results if result["status"] != "not built"]
    verified = [result for result in built if result["status"] == "verified"]
    full = [result for result in verified if result["share"] >= FULLY]
    return (
        f"{len(verified)} of {len(built)} verified on two ranks, {len(full)} of them with at least {FULLY:.0%} of "
        f"their parameters sharded; {len(results) - len(built)} could not be built from a tiny config."
    )


def table(results: list[dict[str, Any]], known: dict[str, str]) -> str:
    """The page `docs/models.md`."""
    import transformers

    lines = [
        "# Causal language models under tensor parallelism",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}; "
        "written by `python -m tests.models.tp_sweep --write docs/models.md`.",
        "",
        summary(results),
        "",
        "Verified: loss and every gradient equal those of the unsharded model (float64, relative 1e-8). The last "
        "column lists",
        "parts that stay whole on every rank because no way to shard them passed the check; they cost memory and time, "
        "not correctness.",
        "",
        "Which models can have their sequences split, and the verified shares, is in "
        "[sequence_parallel.md](sequence_parallel.md).",
        "",
        "| model type | class | rules from | result | sharded | whole, or why |",
        "|---|---|---|---|---|---|",
    ]
    order = {"verified": 0, "wrong": 1, "failed": 2, "refused": 3, "not built": 4}
    for result in sorted(results, key=lambda one: (order[one["status"]], one["model_type"])):
        share = f"{result['share']:.0%}" if "share" in result else ""
        why = result.get("why") or ", ".join(f"`{name}`" for name in result.get("dropped", []))
        why = why.replace("|", "/")
        name = result["model_type"]
        lines.append(
            f"| {name} | {known.get(name, '')} | {result.get('policy', '')} | {result['status']} | {share} | {why} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
