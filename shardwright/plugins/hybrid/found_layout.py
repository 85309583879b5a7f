"""Arguments of `HybridParallelPlugin` that a search finds inside of a running job.

    arguments, report = search_layout(model, optimizer, global_batch_size=1024, sequence_length=4096, ...)

[Note: a search in a process of its own] The search plays ranks of other jobs, so it cannot run in a process that is in
a job already. Rank 0 starts a process that is in none, hands it the model and the optimizer without their weights, and
tells all ranks its answer. That process is named, not imported (`PROGRAM`): the planner stands above the plugins.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...files.huggingface import HfSource
from ...lazy.notes import Notes, Step, set_notes
from ...optim.trial import without_states
from ...pipeline.checkpointing import PipelineGradientCheckpointConfig
from ..agreement import agree_on_arguments, exchange_facts, several
from ..base import require_process_group

PROGRAM = "shardwright.planner.ask"
# What the search decides on, so that nobody else can.
_DECIDED = (
    "tp_size",
    "pp_size",
    "sp_size",
    "ep_size",
    "zero_stage",
    "zero_group_size",
    "microbatch_size",
    "num_microbatches",
    "pp_style",
    "num_model_chunks",
    "num_layers_per_stage",
    "enable_sequence_parallelism",
    "sequence_parallelism_mode",
    "gradient_checkpoint_config",
)
# Of a rank of a job; the process that searches is none.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
_SHOWN = 2000  # characters of what a process that failed has said


def search_layout(
    model: nn.Module, optimizer: Optimizer | None, question: Mapping[str, Any], others: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """The arguments, and a text on how they compare with others. Collective over all ranks; ValueError on all of them
    where nothing fits.

    question   what `planner.ask` asks for, but for the model and the job
    others     arguments of the plugin that are not searched for
    """
    require_process_group("HybridParallelPlugin")
    for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(value, kind) and (name == "model" or value is not None):
            raise ValueError(
                f"from_search({name}={value!r:.100}): {name} must be a torch {kind.__name__}, made and not yet boosted"
            )
    taken = [name for name in others if name in _DECIDED]
    if taken:
        raise ValueError(
            f"from_search({taken[0]}={others[taken[0]]!r}): the search decides on it; leave it out, or give all "
            "arguments to HybridParallelPlugin itself"
        )
    agree_on_arguments("HybridParallelPlugin.from_search", question)
    answer: dict[str, str] = {}
    if dist.get_rank() == 0:
        answer = _answer(model, optimizer, question)
    if several():
        answer = exchange_facts(answer)[0]
    if "error" in answer:
        raise ValueError(f"HybridParallelPlugin.from_search: {answer['error']}")
    arguments = json.loads(answer["arguments"])
    again = json.loads(answer["recompute"])
    if again:
        arguments["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(**again)
    return arguments, answer["report"]


def _answer(model: nn.Module, optimizer: Optimizer | None, question: Mapping[str, Any]) -> dict[str, str]:
    """On rank 0 alone. Never raises, since the others wait for it."""
    try:
        written = without_weights(model, optimizer)
        asked = {**question, "world_size": dist.get_world_size(), "device": _device()}
        if question["gpus_per_node"] is None and "LOCAL_WORLD_SIZE" in os.environ:
            asked["gpus_per_node"] = int(os.environ["LOCAL_WORLD_SIZE"])
        line = json.dumps(asked, default=os.fspath).encode()  # `calibration` may be a path
        done = subprocess.run(
            [sys.executable, "-m", PROGRAM], input=line + b"\n" + written, capture_output=True, env=_environment()
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace")[-_SHOWN:]
            return {"error": f"the process that searches ended with status {done.returncode}: {said}"}
        found: dict[str, str] = json.loads(done.stdout)
        return found
    except Exception as error:  # told to all ranks
        return {"error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}


def _environment() -> dict[str, str]:
    """Without a job and without a device; modules are found where this process finds them."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith(("MASTER_", "TORCHELASTIC_"))
    }
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    return {**kept, **hidden, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _device() -> tuple[str, float] | None:
    """Name and GiB of this rank's."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found.name, found.total_memory / 2**30


def without_weights(model: nn.Module, optimizer: Optimizer | None) -> bytes:
    """For `with_lazy_weights`: modules, settings, whole numbers, and of all else its shape."""
    room = io.BytesIO()
    try:
        _WithoutWeights(room).dump((model, without_states(optimizer) if optimizer is not None else None))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"model={type(model).__name__} cannot be handed to the process that searches: {error}. Classes and "
            "functions that it holds must stand at the top of a module"
        ) from error
    return room.getvalue()


def with_lazy_weights(written: bytes) -> tuple[nn.Module, Optimizer | None]:
    """What `without_weights` has written, anew for each call: a model as a `LazyInitContext` builds it."""
    model, optimizer = pickle.loads(written)
    return model, optimizer


class _WithoutWeights(pickle.Pickler):
    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, nn.Parameter):
            return _lazy_parameter, (tuple(found.shape), found.dtype, found.requires_grad)
        if isinstance(found, torch.Tensor) and (found.is_floating_point() or found.is_complex() or found.is_meta):
            return _zeros, (tuple(found.shape), found.dtype, found.is_meta)
        if isinstance(found, torch.Tensor):
            return _whole_numbers, (found.detach().cpu().numpy(),)
        if isinstance(found, HfSource):
            return _no_source, ()
        if isinstance(found, type | FunctionType) and found.__module__ == "__main__":
            raise ValueError(
                f"{found.__qualname__} is defined in the script itself, where the process that searches does not find "
                "it; put it into a module that the script imports"
            )
        return NotImplemented


def _lazy_parameter(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    param = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=requires_grad)
    notes = Notes(shape, dtype, 0, None)
    notes.add(Step(torch.Tensor.fill_, 0, (None, 0.0), {}), True)
    set_notes(param, notes)
    return param


# Buffers are made where they are read, so that tensors without memory take the place of floating ones there.


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, on_meta: bool) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta" if on_meta else "cpu")


def _whole_numbers(values: Any) -> torch.Tensor:
    return torch.from_numpy(values)


class _NoSource:
    """In place of the files that weights are read from."""

    def __contains__(self, name: str) -> bool:
        return False

    def close(self) -> None:
        pass


def _no_source() -> _NoSource:
    return _NoSource()
