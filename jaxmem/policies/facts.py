"""What a policy is told about a value, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from jaxmem import _compat
from jaxmem.program.ir import Op, Value, aval_bytes
from jaxmem.program.source import module_path
from jaxmem.program.work import arithmetic

DOTS = ("conv_general_dilated", "dot_general", "scaled_matmul_wrapper")
# What stands in front of the checkpoint names that `remat` gives; no rule selects by them.
OWN_NAMES = "jaxmem."
_COUNTED = frozenset(["conv_general_dilated", "dot_general"])


class Action(IntEnum):
    """What happens to a value between the forward and the backward pass, by what it keeps.

    >>> Action.RECOMPUTE < Action.OFFLOAD < Action.SAVE
    True
    >>> ~Action.SAVE, ~Action.OFFLOAD
    (<Action.RECOMPUTE: 0>, <Action.OFFLOAD: 1>)
    """

    RECOMPUTE = 0
    OFFLOAD = 1
    SAVE = 2

    def __invert__(self) -> Action:
        return Action(2 - self)


@dataclass(frozen=True)
class Facts:
    """What is known of one value.

    Attributes:
        names: its checkpoint names.
        module: path of the module that makes it, such as ``"Net/Block_0/mlp"``.
        primitive: the operation that makes it.
        dtype: name of its dtype.
        shape: its shape.
        nbytes: its bytes.
        flops: floating-point operations of that operation, 0 where they are not counted: only
            those of matrix products and convolutions are.
        moved_bytes: bytes that the operation reads and writes.
        batch_dims: batch dimensions of a matrix product, ``None`` for other operations.
    """

    names: tuple[str, ...] = ()
    module: str = ""
    primitive: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    flops: float = 0.0
    moved_bytes: int = 0
    batch_dims: int | None = None

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity of the operation that makes the value."""
        return self.flops / self.moved_bytes if self.moved_bytes else 0.0

    @property
    def label(self) -> str:
        """How an error message calls the value."""
        dims = ",".join(map(str, self.shape))
        what = f"{self.names[0]!r}" if self.names else self.primitive
        where = f" in {self.module}" if self.module else ""
        return f"{what} {self.dtype}[{dims}]{where}"


class Operation(NamedTuple):
    """As much of an equation as facts are made of."""

    primitive: Any
    params: Mapping[str, Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]


class Operand(NamedTuple):
    """An operand or result of an :class:`Operation`."""

    aval: Any


def facts_of(eqn: Any, result: int = 0, *, names: Sequence[str] = (), module: str = "") -> Facts:
    """The facts of one result of an equation."""
    primitive, aval = eqn.primitive.name, eqn.outvars[result].aval
    return Facts(
        names=tuple(names),
        module=module,
        primitive="name" if _name_of(eqn) is not None else primitive,
        dtype=str(getattr(aval, "dtype", "")),
        shape=tuple(getattr(aval, "shape", ())),
        nbytes=aval_bytes(aval),
        flops=arithmetic(eqn) if primitive in _COUNTED else 0.0,
        moved_bytes=sum(aval_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars)),
        batch_dims=batch_dims_of(eqn),
    )


def facts_of_op(op: Op, value: Value, names: Sequence[str] = ()) -> Facts:
    """The facts of one result of an operation of a traced :class:`~jaxmem.program.ir.Program`.

    Args:
        op: the operation; for one that is computed again, the user's own is described.
        value: which of its results.
        names: the checkpoint names of the value, from ``program.source.checkpoint_names``.
    """
    result = next(n for n, made in enumerate(op.outputs) if made is value)
    eqn = op.origin.eqn
    module = module_path(_compat.name_stack_of(eqn))
    return facts_of(eqn, result, names=names, module=module)


def _name_of(eqn: Any) -> str | None:
    return None if isinstance(eqn, Operation) else _compat.checkpoint_name_of(eqn)


def batch_dims_of(eqn: Any) -> int | None:
    """Batch dimensions of a matrix product, ``None`` for other operations."""
    if eqn.primitive.name == "dot_general":
        _, (batch, _) = eqn.params["dimension_numbers"]
        return len(batch)
    if eqn.primitive.name == "scaled_matmul_wrapper":
        # Its first dimension is the batch, and JAX's own policy takes a batch of one for none.
        return int(eqn.invars[0].aval.shape[0] != 1)
    return None
