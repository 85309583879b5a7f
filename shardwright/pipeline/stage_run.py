"""What the modules of a model that is cut consult while one stage's forward of one microbatch runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..utils.tensors import map_tensors, tensors_of
from .applications import Applications
from .cut.template import Template
from .hoisting.layer_trace import Trace
from .hoisting.reads import Watch
from .stubs import absent_like


class StageExit(Exception):
    """Leaves the model's forward behind the last layer of a stage."""


@dataclass
class StageRun:
    """One stage's forward of one microbatch: what the modules consult while it runs."""

    stage: int
    low: int
    high: int
    is_last: bool
    live: frozenset[str]  # modules outside the layers whose output this stage reads
    received: dict[int, Any] = field(default_factory=dict)  # unit before the stage -> its output
    templates: Mapping[int, Template] = field(default_factory=dict)  # of what units return
    # unit of the stage, or entry -> its output, where a later stage reads it
    outputs: dict[int, Any] = field(default_factory=dict)
    wanted: frozenset[int] = frozenset()
    # numbers that units so far have returned, and the sizes of their tensors
    told: dict[int, list[bool | int | float]] = field(default_factory=dict)
    # by their number, of the layers so far; None: nobody collects them
    router_logits: dict[int, torch.Tensor] | None = None
    enter_tail: Callable[[Any], None] | None = None
    trace: Trace | None = None  # instead of layers
    in_model: bool = True  # whether layers are called by the model's forward
    begin: int = 0  # first unit that runs: what the ones before returned is there
    reached: int = -1  # last unit that the model has called
    watch: Watch | None = None  # of what the model's forward reads off tensors
    past: Any = None  # keys and values of the slices before this one
    applications: Applications = field(default_factory=Applications)
    absent: dict[int, Any] = field(default_factory=dict)  # by unit, what has the form of its output

    def output_before(self, unit: int) -> Any:
        """What a gate before the stage returns: its own output, or, when nobody reads that, nothing in the form of
        the next one that arrived, with its own numbers and sizes if it returns numbers.
        """
        known = next(known for known in self.received if known >= unit)  # ascending
        if known == unit:
            return self.templates[unit].apart(self.received[unit])
        if known not in self.absent:
            self.absent[known] = map_tensors(absent_like, self.received[known])
        absent = self.absent[known]
        if unit in self.told and self.templates[unit].num_tensors == self.templates[known].num_tensors:
            template = replace(self.templates[unit], unread=frozenset())
            shapes = template.shapes_in(self.told[unit])
            tensors = [absent_like(one, shape) for one, shape in zip(tensors_of(absent), shapes, strict=True)]
            absent = template.build(tensors, self.told[unit])
        # What the model writes to the outputs of several layers must not meet in one tensor.
        is_written = any((*self.templates[known].written, *self.templates[unit].written))
        return map_tensors(torch.Tensor.clone, absent) if is_written else absent
