"""Tensor parallelism for HuggingFace models, from plans instead of re-typed forwards."""
