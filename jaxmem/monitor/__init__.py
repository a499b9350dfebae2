"""Watching: what is installed, what works, and what fills the memory."""
