"""`shardwright demo`: a first training run that needs no data, no download and no GPU."""
