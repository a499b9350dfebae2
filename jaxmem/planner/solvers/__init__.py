"""Solvers: each proposes a choice for a :class:`~jaxmem.planner.problem.Problem`, one file each."""
