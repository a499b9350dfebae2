"""What a kernel takes beside its operands and results, while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workspace:
    """What a kernel takes beside its operands and results.

    Attributes:
        nbytes: of the room that it works in.
        parts_bytes: of the parts of its result, where that is only there when another kernel has
            added them up, after the operands are read; 0 where it has none.
    """

    nbytes: int = 0
    parts_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Of both, which are there at once."""
        return self.nbytes + self.parts_bytes

    def beside(self, made_bytes: int, dead_bytes: int) -> int:
        """Bytes of it over what is there anyway: results, and operands that die here."""
        if not self.parts_bytes:
            return self.nbytes
        return max(0, self.total_bytes - made_bytes, self.parts_bytes - dead_bytes)
