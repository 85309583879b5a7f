"""Attention functions, and which of them serves a model on a machine."""
