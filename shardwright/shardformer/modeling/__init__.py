"""Models that transformers does not have. Importing one registers it with transformers' auto classes."""
