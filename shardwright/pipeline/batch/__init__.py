"""One batch: cut into microbatches and merged again."""
