"""Names of torch that have no public one; checked on torch 2.11 and 2.13."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# Of torch.nn.functional, whatever has taken its place there.
SDPA: Any = torch._C._nn.scaled_dot_product_attention

__all__ = ["SDPA", "FakeTensor", "disable_current_modes"]
