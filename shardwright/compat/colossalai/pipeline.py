"""Pipeline names that scripts import: the stage manager, for annotations, and the planner of zero-bubble schedules."""

from __future__ import annotations

from typing import Any

from ...plugins.hybrid.model import StageManager
from ...plugins.without_effect import warn_once


class _OfPlugins(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, StageManager)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "PipelineStageManager is not built by hand here: HybridParallelPlugin(pp_size=...).stage_manager is one"
        )


class PipelineStageManager(metaclass=_OfPlugins):
    """What `plugin.stage_manager` is an instance of."""


class PlannedByPlugin(list[Any]):
    """Stands where a schedule was made by hand: the plugin plans it from the model when it is boosted."""


class PipelineGraph:
    """Takes the costs that scripts measured, which the plan is not made from: layers are counted and timed here."""

    def __init__(
        self,
        n_stage: int,
        n_micro: int,
        f_cost: float,
        b_cost: float,
        w_cost: float,
        c_cost: float,
        f_mem: float,
        b_mem: float,
        w_mem: float,
        max_mem: float | None = None,
    ) -> None:
        self.n_stage, self.n_micro = n_stage, n_micro
        if max_mem is not None:
            raise ValueError(
                f"max_mem={max_mem}: use pp_style='auto' and auto_memory= of shardwright's HybridParallelPlugin, which "
                "search a schedule within a memory limit; leave it out"
            )
        warn_once(
            f"PipelineGraph: HybridParallelPlugin(pp_style='zbv') plans for its {n_stage} stages by itself; the costs "
            f"given here (forward {f_cost}, backward {b_cost}, weights {w_cost}, messages {c_cost}) change nothing"
        )

    def get_v_schedule(self, only_run_time: bool = False) -> PlannedByPlugin:
        if only_run_time:
            raise ValueError(
                "only_run_time=True: shardwright plan tells the time of a step; leave it out for HybridParallelPlugin"
            )
        return PlannedByPlugin()
