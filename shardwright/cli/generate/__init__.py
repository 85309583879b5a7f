"""`shardwright generate`: text from a trained model."""
