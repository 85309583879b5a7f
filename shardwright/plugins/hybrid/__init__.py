"""HybridParallelPlugin: settings, what a layout comes to for a model, and its assembly."""
