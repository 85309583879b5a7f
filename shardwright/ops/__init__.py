"""Autograd functions on local tensors."""
