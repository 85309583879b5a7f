"""Small helpers that know nothing of parallelism."""
