"""What the planner predicts beside what others have published, and beside replays of whole layouts.

    python benchmarks/planner.py published        steps and memory of layouts in public tables
    python benchmarks/planner.py memory           what the search estimates beside `shardwright plan --peak`, 32 layouts

Nothing here measures a device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from shardwright.cli.plan import _lazy, _load
from shardwright.planner.candidate import Layout
from shardwright.planner.estimate import Estimate, Estimator
from shardwright.planner.machines import Machine, machine
from shardwright.planner.rates import rates
from shardwright.planner.remade import remade
from shardwright.planner.search import Question, Search
from shardwright.testing.estimates import compare

GIB = 2**30


class Published(NamedTuple):
    """A row of a public table.

    source          where it stands
    model, device, ranks, length
    layout          theirs, as this package would have it
    tokens          a second on each device; 0: not told
    memory          GiB of the fullest device; 0: not told
    """

    source: str
    model: str
    device: Machine
    length: int
    layout: Layout
    tokens: float
    memory: float = 0.0

    @property
    def ranks(self) -> int:
        return self.layout.tp * self.layout.pp * self.layout.sp * self.layout.dp


def fsdp(dp: int, samples: int, whole: float = 0.0, selective: float = 0.0) -> Layout:
    return Layout(1, 1, 1, dp, 3, "1f1b", 1, samples, 1, whole, selective)


# torchtitan's H100s have 96 GB of slower memory, and run at 500 W (their words: the peak lies between those of SXM and
# NVL, and is not known); that of NVL is taken. Their selective recomputation is of every second layer in the older
# table, and of every second product in the newer one; half of the layers stands for both.
GRAND_TETON = Machine("h100 96 GB HBM2e", 835.5e12, 2.4e12, 96 * GIB, 450e9, 50e9)
TITAN = "torchtitan, benchmarks/llama3_h100_202412"
A100 = "torchtitan, docs/performance of 2024"
ROWS = (
    Published(f"{TITAN}, table 1", "llama-8b", GRAND_TETON, 8192, fsdp(8, 2, whole=0.5), 5762, 82.4),
    Published(f"{TITAN}, table 3", "llama-8b", GRAND_TETON, 8192, fsdp(128, 2, whole=0.5), 5605, 67.0),
    Published(f"{A100}, 8B", "llama-8b", machine("a100-80"), 8192, fsdp(64, 1, whole=0.5), 2904),
    Published(f"{A100}, 70B", "llama-70b", machine("a100-80"), 8192, fsdp(64, 1, whole=1.0), 331),
    Published("NeMo/Megatron, 52.8 % MFU", "llama-8b", machine("h100"), 8192, fsdp(8, 1), 0.528),
    Published("HF-class code, 39 % MFU", "llama-8b", machine("h100"), 8192, fsdp(8, 1), 0.39),
    Published("HF-class code, 43 % MFU", "llama-8b", machine("h100"), 8192, fsdp(8, 1), 0.43),
)


def question(model: str, device: Machine, ranks: int, length: int, layers: int | None = None) -> Question:
    config = _load(model)
    if layers is not None:
        config.num_hidden_layers = layers
    build = remade(lambda: _lazy(config))
    return Question(build, lambda made: torch.optim.AdamW(made.parameters()), device, ranks, ranks, length)


def published() -> Iterator[tuple[Published, Estimate]]:
    searches: dict[Any, Search] = {}
    for row in ROWS:
        key = row.model, row.length
        if key not in searches:  # what layers cost is counted once for all devices
            searches[key] = Search(question(row.model, row.device, row.ranks, row.length))
        search = searches[key]
        task = replace(search.task, machine=row.device, world_size=row.ranks)
        found = rates(*search.profiles_of(row.layout.tp), row.device, row.layout.tp, row.layout.samples / row.layout.sp)
        yield row, Estimator(task, found, row.layout).estimate(simulated=True)


def print_published() -> None:
    print(f"{'published':44} {'told':>8} {'predicted':>9} {'off':>6}   GiB told, predicted, off")
    for row, found in published():
        if row.tokens < 1:
            told, predicted = row.tokens, found.mfu
        else:
            layout = row.layout
            told = row.tokens
            predicted = layout.samples * layout.count * layout.dp * row.length / found.seconds / row.ranks
        words = f"{told:8,.4g} {predicted:9,.4g} {predicted / told - 1:+6.0%}"
        if row.memory:
            words += f"   {row.memory:.1f}, {found.memory / GIB:.1f}, {found.memory / GIB / row.memory - 1:+.0%}"
        print(f"{row.source:44} {words}", flush=True)


def layouts() -> list[Layout]:
    def made(**changes: Any) -> Layout:
        given = {"tp": 1, "pp": 1, "sp": 1, "dp": 2, "zero": 1, "style": "1f1b", "chunks": 1, "samples": 1, "count": 4}
        return Layout(**{**given, **changes})

    zb, zbv = {"style": "zb"}, {"style": "zbv", "chunks": 2}
    interleaved = {"style": "interleaved", "chunks": 2}
    two, four = {"pp": 2, "count": 8}, {"pp": 4, "count": 8}
    alone: list[dict[str, Any]] = [{}, {"zero": 2}, {"zero": 3}, {"tp": 2}, {"whole": 1.0}, {"selective": 1.0}]
    alone += [{"zero": 3, "whole": 1.0}]
    kinds = (two, four, {**four, "whole": 0.5}, {**two, **zb}, {**two, **zbv}, {**two, **interleaved})
    piped = [{**kind, **again} for kind in kinds for again in ({}, {"whole": 1.0}) if "whole" not in kind or not again]
    for zero, kinds in ((3, (two, four, {**two, **zb}, {**two, **zbv})), (2, ({**two, **zb}, {**two, **zbv}))):
        piped += [{**kind, "zero": zero, "whole": whole} for kind in kinds for whole in (0.0, 1.0)]
    piped += [{**four, "tp": 2, "whole": 1.0}]
    piped += [{**four, "selective": 1.0}]
    return [made(**changes) for changes in alone + piped]


def print_memory() -> None:
    off = []
    for one in compare(question("llama-8b", machine("h100"), 8, 4096, layers=16), layouts()):
        off.append(abs(one.off))
        estimated, replayed = one.estimated / GIB, one.replayed / GIB
        print(f"{one.layout}: {replayed:.2f} GiB replayed, {estimated:.2f} estimated, {one.off:+.1%}", flush=True)
    print(f"{len(off)} layouts: {median(off):.1%} off in the median, {max(off):.1%} at worst")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("published", "memory"))
    (print_published if parser.parse_args().what == "published" else print_memory)()


if __name__ == "__main__":
    main()
