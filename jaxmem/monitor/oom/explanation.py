"""What is known of an out-of-memory error: plain data, shown by jaxmem.show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxmem.displayed import Displayed
from jaxmem.monitor.figures import DeviceMemory, Figure, HostMemory
from jaxmem.monitor.holders import Holding
from jaxmem.monitor.oom.texts import ReportedBuffer, Where
from jaxmem.planner.report import MemoryReport
from jaxmem.units import format_bytes

# compiled: planned and compiled at the time of the error, within what was free. counted: the bytes
# of arrays that are there. estimated: from the predicted bytes of the step. setting: what an
# allocator may take.
Basis = Literal["compiled", "counted", "estimated", "setting"]
_NAMED = 3


@dataclass(frozen=True)
class Fix:
    """Something that would help.

    Attributes:
        what: what to do, in words.
        code: the same as Python, where it can be said so; else ``""``.
        saves_bytes: bytes of the device that it saves; ``None`` where that is not known.
        basis: what that figure stands on.
        enough: whether it alone is enough, as far as that is known.
    """

    what: str
    code: str
    saves_bytes: int | None
    basis: Basis
    enough: bool = False

    def __str__(self) -> str:
        saves = "" if self.saves_bytes is None else f" (saves {format_bytes(self.saves_bytes)})"
        return f"{self.what}{saves}" + f": {self.code}" * bool(self.code)


@dataclass(frozen=True)
class Explanation(Displayed):
    """Why memory ran out.

    Attributes:
        where: which memory: ``"device"``, ``"compile"`` (the device's, while a program was
            compiled), ``"pinned host"`` or ``"host"``.
        doing: what was running: the name of a step, or ``""``.
        line: ``file.py:line`` of the user's call, ``""`` if unknown.
        message: first line of the original error.
        requested_bytes: what was asked for last; ``None`` where the error does not say.
        device: what the fullest device has in use, right after the error.
        host: what the process has of its host.
        largest_free: the largest block that can be free; ``None`` where nothing is known of it.
        program_bytes: what the compiled step needs, arguments included; ``None`` if unknown.
        report: where the bytes of that step are: by module, by source line; ``None`` if unknown.
        buffers: its largest buffers, as XLA's own allocation report lists them.
        live_bytes: bytes of all live arrays.
        holdings: who holds them, largest first.
        fixes: what would help, best first.
        notes: what could not be found out, and why.
    """

    where: Where
    doing: str
    line: str
    message: str
    requested_bytes: int | None
    device: DeviceMemory | None
    host: HostMemory
    largest_free: Figure | None
    program_bytes: int | None
    report: MemoryReport | None
    buffers: tuple[ReportedBuffer, ...]
    live_bytes: int
    holdings: tuple[Holding, ...]
    fixes: tuple[Fix, ...]
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """What happened, in a sentence."""
        memory = {"device": "device memory", "compile": "device memory"}.get(self.where, self.where)
        memory = memory if "memory" in memory else f"{memory} memory"
        doing = f" in {self.doing}" if self.doing else ""
        while_ = " while it was compiled" if self.where == "compile" else ""
        at = f" at {self.line}" if self.line else ""
        asked = ""
        if self.requested_bytes is not None:
            asked = f": {format_bytes(self.requested_bytes)} more were asked for"
        return f"{memory} ran out{doing}{while_}{at}{asked}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """The figures, in words; each with what it stands on."""
        found = []
        if self.where in ("device", "compile"):
            found += self._of_device()
        if self.where in ("pinned host", "host"):
            rss = f", the process has {self.host.rss}" if self.host.rss else ""
            found.append(f"in pinned host memory: arrays of {self.host.pinned}{rss}")
        if self.program_bytes is not None:
            name = self.doing or "the program"
            found.append(
                f"{name} needs {format_bytes(self.program_bytes)}, arguments included (compiled)"
            )
        elif self.report is not None:
            needs = format_bytes(self.report.peak_bytes)
            found.append(f"{self.doing} needs {needs}, arguments included (predicted)")
        return tuple(found)

    def _of_device(self) -> list[str]:
        device = self.device
        if device is None:
            return []
        limit = f" of {format_bytes(device.limit.nbytes)}" if device.limit else ""
        found = [
            f"{device.device}: {format_bytes(device.in_use.nbytes)}{limit} in use "
            f"({device.in_use.how}), live arrays {format_bytes(self.live_bytes)}"
        ]
        free = device.free_bytes
        if free is not None:
            block = "not told by this allocator"
            if self.largest_free is not None:
                least = "less than " if self.largest_free.how == "inferred" else ""
                block = f"{least}{self.largest_free}"
            found.append(f"free: {format_bytes(free)}; largest free block: {block}")
        return found

    def text(self) -> str:
        """A short form for error messages: what happened, who holds what, the fixes."""
        lines = [f"{self.headline}.", f"  {self.message}"]
        lines += [f"  {sentence}." for sentence in self.sentences]
        held = [f"{h.name} ({format_bytes(h.nbytes)}, {_count(h)})" for h in self.holdings[:_NAMED]]
        if held:
            lines.append(f"  Arrays are held by: {', '.join(held)}.")
        if self.report is not None:
            top = list(self.report.by_source().items())[:_NAMED]
            made = ", ".join(f"{name} ({format_bytes(nbytes)})" for name, nbytes in top)
            lines.append(f"  At the peak of {self.doing}: {made}.")
        elif self.buffers:
            largest = self.buffers[:_NAMED]
            made = ", ".join(f"{b.source or b.shape} ({format_bytes(b.nbytes)})" for b in largest)
            lines.append(f"  Largest buffers of the program: {made}.")
        lines += [f"  {n}. {fix}" for n, fix in enumerate(self.fixes, 1)]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _count(holding: Holding) -> str:
    if holding.count == 1:
        return f"{holding.dtype}{list(holding.shape)}"
    return f"{holding.container or 'arrays'}: {holding.count} arrays"
