"""`shardwright plan --html`: a step as it is predicted, drawn."""
