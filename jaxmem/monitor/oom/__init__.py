"""Errors of memory that ran out, explained: what filled it, who holds it, what would help."""
