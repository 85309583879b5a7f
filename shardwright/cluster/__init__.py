"""Processes: launching them, naming their axes, coordinating them."""
