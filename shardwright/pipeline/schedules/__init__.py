"""One short file per pipeline schedule."""
