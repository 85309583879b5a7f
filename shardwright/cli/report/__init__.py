"""`shardwright report`: a run, or two, as one page."""
