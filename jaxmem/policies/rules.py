"""The three rules that policies are made of: save, recompute, offload what is selected."""

from __future__ import annotations

from typing import Unpack

from jaxmem.policies.algebra import Policy, single_rule
from jaxmem.policies.facts import Action
from jaxmem.policies.selector import Fields, selector


def save(*names: str, **fields: Unpack[Fields]) -> Policy:
    """Returns the policy that saves the values selected and recomputes all others.

    All arguments that are given must hold of a value. Of several names, modules, primitives or
    dtypes one is enough.

    Args:
        names: checkpoint names or globs on them, as given by ``jax.ad_checkpoint.checkpoint_name``.
        module: glob on a run of names in the module path, such as ``"Block_*/mlp"``. What is inside
            a module belongs to it. Linen writes module paths; elsewhere ``jax.named_scope`` does.
        primitive: name of the operation that makes the value, such as ``"dot_general"``.
        dtype: dtype of the value.
        min_bytes: smallest size of the value, in bytes or such as ``"1MiB"``.
        max_bytes: largest size.
        min_flops_per_byte: least arithmetic intensity of the operation that makes the value: its
            FLOPs by the bytes it reads and writes. Only matrix products and convolutions have any.
        max_flops_per_byte: largest arithmetic intensity.
        batch_dims: number of batch dimensions of a matrix product.

    Raises:
        PolicyError: nothing is selected, a field that does not exist, a dtype or primitive that is
            misspelt, or a least size above the largest.

    >>> from jaxmem import policies
    >>> policies.save("attn*", dtype="bfloat16", min_bytes="1MiB") | policies.offload("layer_in")
    offload('layer_in') | save('attn*', dtype='bfloat16', min_bytes=1048576)
    """
    return single_rule(Action.SAVE, selector(names, fields, "save"))


def recompute(*names: str, **fields: Unpack[Fields]) -> Policy:
    """Returns the policy that recomputes the values selected and saves all others.

    It is ``~save(...)``; see :func:`save` for the arguments and errors.

    ``jax.checkpoint`` sees a value before it gets its name, and saves it then: with names, use this
    in :func:`jaxmem.remat` or as an override.

    >>> from jaxmem import policies
    >>> policies.recompute("logits") == ~policies.save("logits")
    True
    """
    return single_rule(Action.RECOMPUTE, selector(names, fields, "recompute"))


def offload(*names: str, **fields: Unpack[Fields]) -> Policy:
    """Returns the policy that moves the values selected to pinned host memory, until the backward
    pass reads them, and recomputes all others.

    See :func:`save` for the arguments and errors. What the backward pass does not read is not
    moved; name a value at the input of a block, not its output. On a CPU the compiler drops the
    transfers.

    >>> from jaxmem import policies
    >>> ~policies.offload("layer_in")  # the rest is saved
    ~offload('layer_in')
    """
    return single_rule(Action.OFFLOAD, selector(names, fields, "offload"))
