"""Plugins: how a model, its optimizer and its data are laid out over the processes."""
