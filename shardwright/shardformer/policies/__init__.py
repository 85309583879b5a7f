"""What one model family needs beyond the plan that transformers ships for it."""
