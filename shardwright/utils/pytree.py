"""Nested structures of tensors: torch's own pytree functions, which know transformers' `ModelOutput` too.

They have no public name in torch 2.11; checked on 2.11 and 2.13.
"""

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "TorchDispatchMode",
    "TreeSpec",
    "current_dispatch_mode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
