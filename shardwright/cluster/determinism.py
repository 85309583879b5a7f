"""`launch(deterministic=True)`: two runs of one script on one layout give the same bits.

torch is told to take its deterministic operators and to refuse, by name, those that have none; what torch does not
govern reads the environment:

    CUBLAS_WORKSPACE_CONFIG         cuBLAS adds in one order, if it has a workspace per stream
    FLASH_ATTENTION_DETERMINISTIC   transformers asks flash-attn for its backward without atomic additions
"""

from __future__ import annotations

import os

import torch

WORKSPACES = (":4096:8", ":16:8")  # of which cuBLAS is deterministic, by its manual
_CUBLAS, _FLASH = "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"


def check_deterministic(wanted: object) -> None:
    """ValueError where it cannot be had any more, before anything is changed."""
    if not isinstance(wanted, bool):
        raise ValueError(f"deterministic={wanted!r} must be True or False")
    if not wanted:
        return
    workspace = os.environ.get(_CUBLAS)
    if workspace is not None and workspace not in WORKSPACES:
        raise ValueError(
            f"deterministic=True with {_CUBLAS}={workspace!r}: cuBLAS is deterministic with "
            f"{' or '.join(WORKSPACES)} only; set one of these, or leave the variable out"
        )
    if workspace is None and torch.cuda.is_initialized():
        raise ValueError(
            f"deterministic=True after CUDA has been used: cuBLAS has read {_CUBLAS} by then. Launch before anything "
            f"runs on a device, or start the processes with {_CUBLAS}={WORKSPACES[0]}"
        )
    if os.environ.get(_FLASH, "1") != "1":
        raise ValueError(
            f"deterministic=True with {_FLASH}={os.environ[_FLASH]!r}: leave the variable out, or set it to 1"
        )


def make_deterministic() -> None:
    """From here on, in this process."""
    os.environ.setdefault(_CUBLAS, WORKSPACES[0])
    os.environ.setdefault(_FLASH, "1")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
