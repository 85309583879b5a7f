"""What transformers does not offer as data: loading by slices."""
