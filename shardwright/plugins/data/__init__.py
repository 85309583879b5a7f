"""Batches on their way to the ranks: who gets which samples, and what is asked of them."""
