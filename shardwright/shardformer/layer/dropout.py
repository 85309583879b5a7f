"""Dropout that differs between ranks where the activations do, and agrees where they do."""
