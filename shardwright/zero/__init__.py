"""Optimizer state, gradients and parameters sharded over data-parallel ranks."""
