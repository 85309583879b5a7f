"""Microbatches cut along the sequence."""
