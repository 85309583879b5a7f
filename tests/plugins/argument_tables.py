"""What to see for each argument of `launch` and of `prepare_dataloader`, for test_every_argument."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

import shardwright
from shardwright.cluster.config import get_launch_config
from shardwright.cluster.heart import heart
from shardwright.plugins import TorchDDPPlugin
from tests.plugins.argument_walk import Changes, Refused, Said, See


def launch_table() -> dict[str, list[Any]]:
    def launched(**given: Any) -> Any:
        shardwright.launch(**{"rank": 0, "world_size": 1, "host": None, "port": None, "backend": None, **given})
        return torch.initial_seed(), dict(get_launch_config() or {})

    def deterministic(value: bool) -> bool:
        try:
            launched(deterministic=value)
            return torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)

    def options(name: str) -> See:
        return lambda value: launched(**{name: value})

    return {
        "rank": [Refused(options("rank"), "0", "use 0"), Refused(options("rank"), 1, "rank=1 must lie in 0..0")],
        "world_size": [Refused(options("world_size"), 2, "a process joins one job")],
        "host": [],  # tests/unit/test_launch.py: where rank 0 listens
        "port": [Refused(options("port"), "29500", "use 29500")],
        "backend": [
            Refused(options("backend"), "glo", "did you mean 'gloo'"),
            Said(options("backend"), "fake", "has no effect"),
        ],
        "seed": [Changes(options("seed"), 1, 2)],
        "local_rank": [Refused(options("local_rank"), "0", "use 0")],
        "config": [Changes(options("config"), None, {"parallel": {}, "mark": 1})],
        "timeout": [
            Refused(options("timeout"), -1, "timeout=-1 must be a positive number"),
            Refused(options("timeout"), "20", "timeout='20' must be"),
            Said(options("timeout"), timedelta(seconds=7), "timeout=0:00:07) has no effect"),
        ],
        "verbose": [Said(options("verbose"), True, "1 rank(s)")],
        "deterministic": [  # what follows: tests/reliability/test_deterministic.py
            Changes(deterministic, False, True),
            Refused(options("deterministic"), "yes", "deterministic='yes' must be True or False"),
        ],
        "idle_timeout": [
            Changes(lambda value: (launched(idle_timeout=value), heart.budgets.idle)[1], None, 5.0),
            Refused(options("idle_timeout"), 0, "idle_timeout=0 must be a positive number of seconds, or None"),
        ],
        "step_timeout": [
            Changes(lambda value: (launched(step_timeout=value), heart.budgets.of("Model.forward"))[1], "auto", 5.0),
            Refused(options("step_timeout"), 0, "step_timeout=0 must be a positive number of seconds, 'auto'"),
        ],
    }


def loader_table() -> dict[str, list[Any]]:
    plugin = TorchDDPPlugin()

    def loader(**given: Any) -> Any:
        return plugin.prepare_dataloader(**{"dataset": list(range(7)), "batch_size": 2, "num_workers": 0, **given})

    def dealt(name: str, **base: Any) -> See:
        return lambda value: [list(map(int, batch)) for batch in loader(**{**base, name: value})]

    class Backwards(torch.utils.data.DistributedSampler):
        def __iter__(self) -> Any:
            return iter(list(super().__iter__())[::-1])

    return {
        "dataset": [Changes(dealt("dataset"), [1, 2], [3, 4]), Refused(dealt("dataset"), [], "has no samples")],
        "batch_size": [
            Changes(dealt("batch_size"), 2, 3),
            Refused(dealt("batch_size"), "2", "use 2"),
            Refused(dealt("batch_size"), 0, "=0"),
        ],
        "shuffle": [Changes(dealt("shuffle"), False, True), Refused(dealt("shuffle"), "no", "use False")],
        "seed": [Changes(dealt("seed", shuffle=True), 1, 2)],
        "drop_last": [Changes(dealt("drop_last"), False, True)],
        "pin_memory": [Changes(lambda value: loader(pin_memory=value).pin_memory, False, True)],
        "num_workers": [Changes(lambda value: loader(num_workers=value).num_workers, 0, 1)],
        "distributed_sampler_cls": [Changes(dealt("distributed_sampler_cls"), None, Backwards)],
        "kwargs": [
            Changes(dealt("collate_fn"), None, lambda samples: [0]),
            Refused(lambda value: loader(shufle=value), True, "did you mean 'shuffle'"),
            Refused(lambda value: loader(sampler=value), [1], "distributed_sampler_cls"),
        ],
    }
