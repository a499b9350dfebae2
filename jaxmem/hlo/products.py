"""Products and convolutions of a compiled program, and what each takes beside its operands.

A kernel of cuBLAS or cuDNN may be given a workspace: 32 MiB for one of cuBLASLt's on Hopper,
whatever it multiplies. And XLA splits a product that has too few tiles for all multiprocessors
along the axis that is summed (split-K): the parts are in memory until another kernel adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxmem.hlo.module import Computation, Instruction, Module
from jaxmem.hlo.work import CONVOLUTIONS, PRODUCTS

_PRODUCTS = frozenset(["dot", "convolution"])
# A workspace is bytes.
_ROOMS = frozenset(["int8", "uint8"])


class Product(NamedTuple):
    """A product or a convolution, wherever the compiler put it.

    Attributes:
        operands: how many numbers its two operands have, in order of size; which of them is the
            left one, and how they are laid out, is the compiler's business.
        dims: of its result, or of the parts of it where it is split: one more, that counts them.
        nbytes: of these.
        workspace_bytes: of the room that a call of cuBLAS or cuDNN works in.
    """

    operands: tuple[int, int]
    dims: tuple[int, ...]
    nbytes: int
    workspace_bytes: int

    @property
    def size(self) -> int:
        """How many numbers that is."""
        return math.prod(self.dims)


def products_of(module: Module) -> Iterator[Product]:
    """The products and convolutions of a scheduled program in the order in which they run.

    Those in loops and in what is called are there once.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem.hlo.module import read_module
    >>> a, b = jnp.ones((64, 32)), jnp.ones((32, 8))
    >>> module = read_module(jax.jit(jnp.dot).lower(a, b).compile())
    >>> [(p.operands, p.size, p.workspace_bytes) for p in products_of(module)]
    [((256, 2048), 512, 0)]
    """
    yield from _of(module, module.entry)


def _of(module: Module, computation: Computation) -> Iterator[Product]:
    for ident in computation.sequence or computation.instructions:
        one = module.instructions[ident]
        if one.opcode in _PRODUCTS:
            yield _product(module, one, 0)
        elif one.opcode == "custom-call" and _is_called(one):
            rooms = (part.nbytes for part in one.shape.parts[1:] if part.dtype in _ROOMS)
            yield _product(module, one, sum(rooms))
        else:
            for called in one.called:
                if called in module.computations:
                    yield from _of(module, module.computations[called])


def _is_called(one: Instruction) -> bool:
    named = one.target in CONVOLUTIONS or one.target.startswith(PRODUCTS)
    return named and len(one.operands) > 1


def _product(module: Module, one: Instruction, workspace_bytes: int) -> Product:
    result = one.shape.parts[0] if one.shape.parts else one.shape
    first, second = sorted(module.instructions[i].shape.size for i in one.operands[:2])
    return Product((first, second), result.dims, result.nbytes, workspace_bytes)
