"""The facade a training script talks to."""
