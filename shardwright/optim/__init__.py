"""Optimizers with the names that users of other frameworks know."""
