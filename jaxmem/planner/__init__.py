"""What to keep and what to recompute."""
