"""The arrays of a program: each with its type, its bytes on each device, and how it is split."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex
from jax.sharding import NamedSharding

from jaxmem.program.layout import Layout


class Value:
    """One array of the program.

    Attributes:
        aval: its shape and dtype, as a whole.
        nbytes: its bytes on each device; 0 where it is in host memory.
        key: stable identity for plans; ``None`` for values the rewrite makes anew.
        host: whether it is in host memory.
        layout: how it is split over several devices; ``None`` where each has all of it, or where
            that is not known (:mod:`jaxmem.runtime.layouts`).
        pinned: the sharding that the compiler is told to give it; ``None`` where it chooses.
    """

    __slots__ = ("aval", "host", "key", "layout", "nbytes", "pinned")

    def __init__(
        self,
        aval: Any,
        key: str | None = None,
        host: bool = False,
        layout: Layout | None = None,
    ):
        self.aval = aval
        self.key = key
        self.host = host
        self.pinned: NamedSharding | None = None
        self.lay_out(layout)

    def lay_out(self, layout: Layout | None) -> None:
        """From now on it is split like this."""
        self.layout = layout
        self.nbytes = 0 if self.host else self.part_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of what each device has of it, wherever it is."""
        return aval_bytes(self.aval) if self.layout is None else self.layout.part_bytes(self.aval)

    @property
    def host_bytes(self) -> int:
        """Its bytes in host memory, for each device; 0 where it is on the device."""
        return self.part_bytes if self.host else 0

    def on_host(self) -> Value:
        """A new value of the same shape and dtype in host memory: what a send makes of it."""
        return Value(self.aval, f"{self.key}.host", host=True, layout=self.layout)

    def on_device(self) -> Value:
        """A new value of the same shape and dtype on the device: what a fetch makes of it."""
        return Value(self.aval, layout=self.layout)

    def like(self) -> Value:
        """A new value of the same shape and dtype: what a recomputation produces."""
        made = Value.__new__(Value)
        made.aval, made.key, made.nbytes, made.host = self.aval, None, self.nbytes, self.host
        made.layout, made.pinned = self.layout, self.pinned
        return made

    def stack(self, length: int, key: str | None = None) -> Value:
        """A new value of ``length`` rows like this one."""
        layout = None if self.layout is None else self.layout.stacked()
        return Value(stacked(self.aval, length), key, self.host, layout)

    def __repr__(self) -> str:
        return f"Value({self.key}: {self.aval})"


Atom = Value | jex.Literal


def aval_bytes(aval: Any) -> int:
    """Bytes of an array of this aval; 0 for tokens and other things without a shape."""
    dtype, shape = getattr(aval, "dtype", None), getattr(aval, "shape", None)
    if dtype is None or shape is None:
        return 0
    size = dtype.itemsize
    for dim in shape:
        size *= dim
    return size


def stacked(aval: Any, length: int) -> Any:
    """The aval of ``length`` rows of ``aval``; where types say how rows lie on a mesh, so do these.

    >>> import jax
    >>> stacked(jax.core.ShapedArray((3,), "float32"), 2).shape
    (2, 3)
    """
    sharding, shape = getattr(aval, "sharding", None), (length, *aval.shape)
    if sharding is None or sharding.mesh.empty:
        return aval.update(shape=shape)
    return aval.update(shape=shape, sharding=sharding.update(spec=(None, *sharding.spec)))
