"""The `shardwright` command: one file or folder per verb."""
