"""Models against ways to train them: every cell is one class of transformers, at a tiny size, on one layout of ranks,
compared with the same class in one process.

    for cell in run_cells(Subject("Qwen3ForCausalLM"), pick_axes(["tp2", "pp2"])):
        print(cell["axis"], cell["outcome"], cell.get("why", ""))

An outcome is `verified`, `refused` (a ValueError of ours, whose text is the reason), `wrong` (numbers differ), `failed`
(anything else that ended it), `not applicable` or `not built` (no tiny model that one process can train).
"""

from .axes import AXES, Axis, pick_axes
from .run import run_cells
from .subject import Subject

__all__ = ["AXES", "Axis", "Subject", "pick_axes", "run_cells"]
