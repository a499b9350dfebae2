"""Sizes and times as people write and read them; the only place that parses or prints them."""

from __future__ import annotations

import math
import operator
import re
import sys
from fractions import Fraction
from typing import SupportsIndex

from jaxmem.errors import BudgetError

KIB, MIB, GIB, TIB = (2**10, 2**20, 2**30, 2**40)

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_BINARY_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_NUMBER = r"(?P<number>\d{1,24}(?:\.\d{0,24})?|\.\d{1,24})"
_SIZE = re.compile(rf"(?P<sign>[+-]?)\s*{_NUMBER}\s*(?P<unit>[a-z]*)", re.IGNORECASE)
_PERCENT = re.compile(rf"(?P<sign>[+-]?)\s*{_NUMBER}\s*%")
_SIZE_FORMS = '"20GiB", "1.5GB", "512MiB" or a number of bytes'
_BUDGET_FORMS = f'{_SIZE_FORMS}, "80%" of the device, or None for all of it'


def parse_bytes(size: str | SupportsIndex | float) -> int:
    """Returns a size as a whole number of bytes.

    KiB, MiB, GiB and TiB are powers of 1024; kB, MB, GB and TB are powers of 1000; upper and
    lower case mean the same. A fraction of a byte is dropped.

    Args:
        size: text such as ``"20GiB"`` or ``"1.5 GB"``, or a number of bytes.

    Raises:
        BudgetError: the size is not a number with a known unit, or is not at least one byte.

    >>> parse_bytes("20GiB"), parse_bytes("1.5 GB"), parse_bytes(4096)
    (21474836480, 1500000000, 4096)
    """
    return _parse_size(size, _SIZE_FORMS)


def parse_budget(
    budget: str | SupportsIndex | float | None,
    device_bytes: int,
    device: str = "device",
    most_bytes: int | None = None,
) -> int:
    """Returns a budget for one device as a whole number of bytes.

    Args:
        budget: what :func:`parse_bytes` takes, a share of the device such as ``"80%"``, or
            ``None`` for all of it.
        device_bytes: usable bytes of the device; shares are of these.
        device: name of the device, for the error message.
        most_bytes: what may be asked for in bytes, where that is more.

    Raises:
        BudgetError: the budget cannot be understood, is not at least one byte, or is more than
            the device has.

    >>> parse_budget("80%", 10_000), parse_budget(None, 10_000)
    (8000, 10000)
    """
    nbytes = budget_bytes(budget, device_bytes)
    is_share = isinstance(budget, str) and budget.strip().endswith("%")
    if nbytes > (device_bytes if is_share else max(device_bytes, most_bytes or 0)):
        raise BudgetError(
            f"budget={budget!r} ({format_bytes(nbytes)}) is more than {device} has: "
            f"{format_bytes(device_bytes)} usable ({device_bytes} bytes). "
            "Use budget=None for all of it, or name a larger target."
        )
    return nbytes


def check_budget(budget: str | SupportsIndex | float | None) -> None:
    """Check that a budget can be understood, before it is known which device it is for.

    Raises:
        BudgetError: as :func:`parse_budget`, but for a budget that the device does not have.

    >>> check_budget("80%")
    """
    budget_bytes(budget, sys.maxsize)


def format_bytes(nbytes: float) -> str:
    """Returns a size to one decimal in the largest binary unit that keeps it at least one.

    >>> format_bytes(15354554417), format_bytes(512), format_bytes(-2 * 2**20)
    ('14.3GiB', '512B', '-2.0MiB')
    """
    for unit, unit_bytes in _BINARY_UNITS:
        # 0.95 of the next unit would print as "1024.0" of this one or round up to it.
        if abs(nbytes) >= unit_bytes * (1 - 0.05 / 1024):
            return f"{nbytes / unit_bytes:.1f}{unit}"
    return f"{nbytes:.0f}B"


def format_budget(nbytes: int) -> str:
    """Returns a size rounded up to two decimals, so that read back it is never too small.

    Error messages that tell the user which budget works use this one.

    >>> format_budget(15354554417), parse_bytes(format_budget(15354554417)) >= 15354554417
    ('14.31GiB', True)
    """
    for unit, unit_bytes in _BINARY_UNITS:
        if nbytes >= unit_bytes:
            hundredths = -(-nbytes * 100 // unit_bytes)
            return f"{hundredths // 100}.{hundredths % 100:02d}{unit}"
    return f"{nbytes}B"


def floor_budget(nbytes: int) -> str:
    """Returns a size rounded down to two decimals, so that read back it is never too large.

    >>> floor_budget(15354554417), parse_bytes(floor_budget(15354554417)) <= 15354554417
    ('14.30GiB', True)
    """
    for unit, unit_bytes in _BINARY_UNITS:
        if nbytes >= unit_bytes:
            hundredths = nbytes * 100 // unit_bytes
            return f"{hundredths // 100}.{hundredths % 100:02d}{unit}"
    return f"{nbytes}B"


def format_seconds(seconds: float) -> str:
    """Returns a duration with three significant digits, or minutes and seconds past a minute.

    >>> [format_seconds(s) for s in (2.5e-05, 0.0123, 4.2, 125)]
    ['25.0us', '12.3ms', '4.20s', '2min 05s']
    """
    if abs(seconds) >= 59.995:
        minutes, rest = divmod(round(abs(seconds)), 60)
        return f"{'-' if seconds < 0 else ''}{minutes}min {rest:02d}s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        scaled = seconds * scale
        if abs(scaled) >= 0.9995:
            return (
                f"{scaled:.{2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0}f}{unit}"
            )
    return "0s" if seconds == 0 else f"{seconds * 1e9:.0f}ns"


def budget_bytes(budget: str | SupportsIndex | float | None, device_bytes: int) -> int:
    """Returns a budget as a number of bytes, which may be more than the device has.

    Raises:
        BudgetError: the budget cannot be understood, or is not at least one byte.

    >>> budget_bytes("200%", 10_000)
    20000
    """
    if budget is None:
        return device_bytes
    percent = _PERCENT.fullmatch(budget.strip()) if isinstance(budget, str) else None
    if percent is None:
        return _parse_size(budget, _BUDGET_FORMS)
    share = _signed(percent) * device_bytes / 100
    return _positive(share, budget, _BUDGET_FORMS, what="budget")


def _parse_size(size: object, forms: str) -> int:
    if isinstance(size, bool):
        raise BudgetError(f"{size!r} is not a size. Use {forms}.")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        unit_bytes = _UNIT_BYTES.get(match["unit"].lower()) if match else None
        if match is None or unit_bytes is None:
            raise BudgetError(f"{size!r} is not a size{_unit_hint(match)}. Use {forms}.")
        return _positive(_signed(match) * unit_bytes, size, forms)
    if isinstance(size, float):
        if not math.isfinite(size):
            raise BudgetError(f"{size!r} is not a size. Use {forms}.")
        return _positive(Fraction(size), size, forms)
    try:
        return _positive(Fraction(operator.index(size)), size, forms)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise BudgetError(
            f"{size!r} ({type(size).__name__}) is not a size. Use {forms}."
        ) from error


def _unit_hint(match: re.Match[str] | None) -> str:
    unit = match["unit"].upper() if match else ""
    if unit in ("K", "M", "G", "T"):
        return f": {unit} alone could be {unit}iB or {unit}B"
    return ""


def _signed(match: re.Match[str]) -> Fraction:
    number = Fraction(match["number"].removesuffix("."))
    return -number if match["sign"] == "-" else number


def _positive(nbytes: Fraction, given: object, forms: str, what: str = "size") -> int:
    if nbytes < 1:
        kind = "negative" if nbytes < 0 else "zero" if nbytes == 0 else "less than one byte"
        raise BudgetError(
            f"{given!r} is a {kind} {what}; it must be at least one byte. Use {forms}."
        )
    return math.floor(nbytes)
