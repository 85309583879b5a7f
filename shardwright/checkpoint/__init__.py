"""Checkpoints that do not remember the layout they were written in."""
