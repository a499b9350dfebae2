"""Policies people write: which values to save, offload or recompute for the backward pass.

The same policy works in :func:`jaxmem.remat`, in ``jax.checkpoint(policy=...)`` and in what is
built on that: ``nn.remat``, ``nnx.remat``, ``nn.remat_scan``.
"""

from jaxmem.policies.algebra import (
    Policy,
    dots,
    dots_with_no_batch_dims,
    everything,
    nothing,
    planned,
)
from jaxmem.policies.checks import check
from jaxmem.policies.facts import Action, Facts
from jaxmem.policies.rules import offload, recompute, save

__all__ = [
    "Action",
    "Facts",
    "Policy",
    "check",
    "dots",
    "dots_with_no_batch_dims",
    "everything",
    "nothing",
    "offload",
    "planned",
    "recompute",
    "save",
]
