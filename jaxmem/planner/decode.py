"""Read plain data back into dataclasses; what has the wrong type is refused by its name."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from jaxmem.errors import PlanMismatchError

AGAIN = "Plan again: jaxmem.plan(step, *args, budget=...)."


@dataclasses.dataclass(frozen=True)
class Kept:
    """What was kept as JSON, for errors about it: its name, the error, and how to have another."""

    name: str
    error: type[Exception]
    again: str


PLAN = Kept("plan", PlanMismatchError, AGAIN)
# Larger than any memory, and what other readers of JSON take for an integer.
_MOST = 2**63 - 1
_SHOWN = 40


def parse(text: str, kept: Kept = PLAN) -> Any:
    """The data of a JSON text.

    Raises:
        PlanMismatchError: not JSON, or an object names a field twice; of other things than plans
            the error of ``kept``.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise kept.error(f"not a jaxmem {kept.name}: {error}. {kept.again}") from error


def decode(kind: Any, data: Any, where: str = "", kept: Kept = PLAN) -> Any:
    """``data`` as a value of type ``kind``.

    Args:
        kind: a dataclass, ``int`` (0 or more), ``float`` (0 or more), ``str``, ``bool``, a
            ``Literal``, ``X | None``, or a tuple of these.
        data: what JSON gave.
        where: how the place of ``data`` is called in errors.
        kept: what the data is of.

    Raises:
        PlanMismatchError: it is something else; the message names the place. Of other things than
            plans the error of ``kept``.
    """
    origin, inner = _form(kind)
    if origin is dataclasses:
        return _record(kind, data, where, kept)
    if origin in (types.UnionType, typing.Union):
        (some,) = [k for k in inner if k is not types.NoneType]
        return None if data is None else decode(some, data, where, kept)
    if origin is typing.Literal:
        if not isinstance(data, str) or data not in inner:
            raise damaged(where, data, f"one of {', '.join(map(repr, inner))}", kept)
        return data
    if origin is tuple:
        return _tuple(inner, data, where, kept)
    return _plain(kind, data, where, kept)


def damaged(where: str, data: Any, wanted: str, kept: Kept = PLAN) -> Exception:
    """The error for a place that holds something else than it should."""
    kind = {list: "a list", dict: "an object"}.get(type(data))
    shown = kind or repr(data)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    return kept.error(
        f"{kept.name} file is damaged: {where} is {shown}, not {wanted}. {kept.again}"
    )


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it says {name!r} twice")
        found[name] = value
    return found


@functools.cache
def _form(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """What kind of type it is, ``dataclasses`` for one of these, and what it is of."""
    if dataclasses.is_dataclass(kind):
        return dataclasses, ()
    return typing.get_origin(kind), typing.get_args(kind)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _record(kind: Any, data: Any, where: str, kept: Kept) -> Any:
    if not isinstance(data, dict):
        raise damaged(where or "the file", data, "an object", kept)
    hints, prefix = _hints(kind), f"{where}." if where else ""
    unknown = sorted(data.keys() - hints.keys())
    missing = [name for name in hints if name not in data]
    for names, problem in ((unknown, f"is not a field of a {kept.name}"), (missing, "is missing")):
        if names:
            raise kept.error(
                f"{kept.name} file is damaged: {prefix}{names[0]} {problem}. {kept.again}"
            )
    return kind(
        **{name: decode(hints[name], data[name], f"{prefix}{name}", kept) for name in hints}
    )


def _tuple(inner: tuple[Any, ...], data: Any, where: str, kept: Kept) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise damaged(where, data, "a list", kept)
    if inner[-1] is Ellipsis and inner[0] in _PLAIN and all(map(_PLAIN[inner[0]][0], data)):
        return tuple(data)
    kinds = [inner[0]] * len(data) if inner[-1] is Ellipsis else list(inner)
    if len(kinds) != len(data):
        raise damaged(where, data, f"a list of {len(kinds)}", kept)
    places = [f"{where}[{n}]" for n in range(len(data))]
    return tuple(map(decode, kinds, data, places, [kept] * len(data)))


def _plain(kind: Any, data: Any, where: str, kept: Kept) -> Any:
    is_right, wanted = _PLAIN[kind]
    if not is_right(data):
        raise damaged(where, data, wanted, kept)
    return data


def _is_count(data: Any) -> bool:
    return isinstance(data, int) and not isinstance(data, bool) and 0 <= data <= _MOST


def _is_amount(data: Any) -> bool:
    if isinstance(data, int):
        return _is_count(data)
    return isinstance(data, float) and not math.isnan(data) and data >= 0


_PLAIN: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (_is_count, "a whole number, 0 or more"),
    float: (_is_amount, "a number, 0 or more"),
    str: (lambda data: isinstance(data, str), "text"),
    bool: (lambda data: isinstance(data, bool), "true or false"),
}
