"""Compile a schedule, check it against its plan, run it."""
