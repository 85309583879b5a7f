"""Which layers each stage gets: what the parts of a model read, where it can be cut, and what the cuts cost."""
