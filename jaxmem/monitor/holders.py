"""Who holds arrays: the variables and attributes through which Python reaches them."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import jax
import numpy as np

from jaxmem.errors import is_library
from jaxmem.monitor.arrays import kind_of, made_at

_MOST_SECONDS = 1.0
_MOST_OBJECTS = 200_000
# What is no container of arrays, or leads away from the user's own data.
_CLOSED = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    np.ndarray,
    np.generic,
    type,
    types.ModuleType,
    types.CodeType,
    types.BuiltinFunctionType,
    types.TracebackType,
    jax.stages.Compiled,
    jax.stages.Lowered,
    jax.Device,
)
# A holder is named by the innermost object that has so much of what its variable holds.
_MOST_OF = 0.9
# gc.get_referrers compares every object with every array: a second for thousands of them.
_MOST_UNNAMED = 32
_NOBODY = "no variable that was found"
_LATE = "unknown, looking took too long"


@dataclass(frozen=True)
class Found:
    """An array and the way to it.

    Attributes:
        path: the keys, attributes and indices from a variable to the array; the first is the
            variable's name.
        nbytes: bytes with all copies.
        frame: the function that has the variable, ``""`` for one of a module.
    """

    path: tuple[str, ...]
    nbytes: int
    frame: str


@dataclass(frozen=True)
class Holding:
    """What one variable, attribute or container holds.

    Attributes:
        name: how Python code reaches it, such as ``"trainer.history"``; a description where no
            variable leads to it.
        nbytes: bytes of all arrays in it.
        count: how many there are.
        container: type of what holds them: ``"list"``, ``"dict"``; ``"Array"`` for one alone.
        largest: path of the largest array.
        largest_bytes: bytes of that.
        shape: its shape.
        dtype: its dtype.
        source: ``file.py:line (function)`` where it was made, ``""`` if unknown.
        scope: the function whose variable it is, ``""`` for a module's.
        reachable: whether ``name`` is an expression.
    """

    name: str
    nbytes: int
    count: int
    container: str
    largest: str
    largest_bytes: int
    shape: tuple[int, ...]
    dtype: str
    source: str
    scope: str = ""
    reachable: bool = True


def stacks(traceback: types.TracebackType | None = None) -> list[types.FrameType]:
    """Frames of the user's own code, innermost first: of a traceback, then of every thread."""
    frames: list[types.FrameType] = []
    while traceback is not None:
        frames.insert(0, traceback.tb_frame)
        traceback = traceback.tb_next
    # Its own frame must not be in its own list: that cycle would keep all of the others.
    here = threading.get_ident()
    others = [f for thread, f in sys._current_frames().items() if thread != here]
    for frame in (sys._getframe(1), *others):
        walked: types.FrameType | None = frame
        while walked is not None:
            frames.append(walked)
            walked = walked.f_back
    own = {id(f): f for f in frames if not is_library(f.f_code.co_filename)}
    return list(own.values())


def variables_of(frame: types.FrameType) -> dict[str, Any]:
    """The variables of a frame, without leaving a copy of them in it.

    Up to Python 3.12 asking a function's frame leaves a dictionary there, which would keep arrays
    alive after their variables are gone (PEP 667).
    """
    kept = frame.f_locals
    found = dict(kept)
    if kept is not frame.f_globals and sys.version_info < (3, 13):
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # A function's.
            kept.clear()
    return found


def holdings(
    arrays: Sequence[Any],
    frames: Iterable[types.FrameType] = (),
    most_seconds: float | None = None,
) -> tuple[Holding, ...]:
    """Who holds these arrays, largest first.

    Variables of the frames and of the user's modules are followed into containers and objects.
    What no variable leads to, such as what only an ended function's closure has, is described by
    what refers to it. An array that several hold counts for the first that is found.

    Args:
        arrays: arrays that are alive.
        frames: where local variables are looked for.
        most_seconds: when to stop looking; one by default.
    """
    until = time.perf_counter() + (_MOST_SECONDS if most_seconds is None else most_seconds)
    wanted = {id(array): array for array in arrays}
    found = _walk(wanted, _roots(frames), until)
    rest = [array for array in arrays if id(array) not in found]
    named = _grouped(found, wanted)
    rest.sort(key=lambda array: -kind_of(array).nbytes)
    named += _referred(rest, (arrays, wanted), until)
    return tuple(sorted(named, key=lambda h: (-h.nbytes, h.name)))


def _roots(frames: Iterable[types.FrameType]) -> Iterator[list[tuple[str, Any, str]]]:
    """Variables by name, with the function that has them; those that live longest come first.

    A function's parameter is another name of what its caller has, and letting go of it frees
    nothing: so modules come before functions, and callers before what they call.
    """
    outermost_first = list(frames)[::-1]
    spaces = {id(f.f_globals): f.f_globals for f in outermost_first}
    main = sys.modules["__main__"]
    # A notebook's has no file; one that is a library's is a launcher.
    if not is_library(getattr(main, "__file__", None) or "<stdin>"):
        spaces = {id(vars(main)): vars(main), **spaces}
    for space in spaces.values():
        yield [(name, value, "") for name, value in _own(space)]
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(module, types.ModuleType) or not path or is_library(path):
            continue
        if id(vars(module)) not in spaces:
            yield [(f"{name}.{n}", v, "") for n, v in _own(vars(module))]
    for frame in outermost_first:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            scope = frame.f_code.co_name
            yield [(name, value, scope) for name, value in variables_of(frame).items()]


def _own(space: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The variables of a module that Python has not put there; its loader leads everywhere."""
    return [(n, v) for n, v in list(space.items()) if not (n[:2] == "__" == n[-2:])]


def _walk(
    wanted: Mapping[int, Any], roots: Iterable[list[tuple[str, Any, str]]], until: float
) -> dict[int, tuple[Found, tuple[Any, ...]]]:
    """The way to each array, the shortest from the first variables that lead there."""
    found: dict[int, tuple[Found, tuple[Any, ...]]] = {}
    seen: set[int] = {id(wanted)}
    for variables in roots:
        # Hidden names, such as a notebook's last results, come last.
        variables.sort(key=lambda root: root[0].rsplit(".", 1)[-1].startswith("_"))
        queue: deque[tuple[tuple[str, ...], Any, str, tuple[Any, ...]]] = deque(
            ((name,), value, scope, ()) for name, value, scope in variables
        )
        while queue:
            if len(found) == len(wanted) or len(seen) > _MOST_OBJECTS:
                return found
            path, value, scope, above = queue.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if id(value) in wanted:
                nbytes = kind_of(wanted[id(value)]).nbytes
                found[id(value)] = Found(path, nbytes, scope), (*above, value)
                continue
            if len(seen) % 1024 == 0 and time.perf_counter() > until:
                return found
            # Objects of others may raise anything when they are looked into, as proxies do of
            # what is not there: what they hold is then nobody's.
            with contextlib.suppress(Exception):
                for key, child in _children(value):
                    queue.append(((*path, key), child, scope, (*above, value)))
    return found


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, with how Python reaches it."""
    if value is None or isinstance(value, _CLOSED):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in list(value.items()))
        return
    names = getattr(value, "_fields", ()) if isinstance(value, tuple) else ()
    if names:
        yield from ((f".{name}", getattr(value, name)) for name in names)
        return
    if isinstance(value, list | tuple | deque):
        yield from ((f"[{n}]", child) for n, child in enumerate(list(value)))
        return
    if isinstance(value, set | frozenset):
        yield from (("{...}", child) for child in list(value))
        return
    if isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        return
    if isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            try:
                yield f" (closure: {name})", cell.cell_contents
            except ValueError:
                continue  # Not assigned yet.
        return
    yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            yield from ((f" (local: {n})", v) for n, v in variables_of(value.gi_frame).items())
        return
    kept = getattr(value, "__dict__", None)
    if isinstance(kept, dict):
        yield from ((f".{name}", child) for name, child in list(kept.items()))
    elif is_dataclass(value):
        yield from ((f".{f.name}", getattr(value, f.name, None)) for f in fields(value))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            member = base.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield f".{name}", member.__get__(value)
                except AttributeError:
                    continue  # Not set.


def _grouped(
    found: Mapping[int, tuple[Found, tuple[Any, ...]]], wanted: Mapping[int, Any]
) -> list[Holding]:
    """What is found, by the innermost object that has most of what its variable holds."""
    by_root: dict[tuple[str, str], list[tuple[Found, tuple[Any, ...]]]] = {}
    for way in found.values():
        by_root.setdefault((way[0].frame, way[0].path[0]), []).append(way)
    grouped = []
    for (scope, _), ways in by_root.items():
        depth = 1
        whole = sum(way.nbytes for way, _ in ways)
        while True:
            sums: dict[tuple[str, ...], int] = {}
            for way, _ in ways:
                if len(way.path) > depth:
                    start = way.path[: depth + 1]
                    sums[start] = sums.get(start, 0) + way.nbytes
            largest = max(sums, key=sums.__getitem__, default=())
            if not largest or sums[largest] < _MOST_OF * whole:
                break
            depth += 1
            ways = [way for way in ways if way[0].path[:depth] == largest]
        grouped.append(_holding(ways, depth, scope, wanted))
    return grouped


def _holding(
    ways: Sequence[tuple[Found, tuple[Any, ...]]],
    depth: int,
    scope: str,
    wanted: Mapping[int, Any],
) -> Holding:
    first, objects = max(ways, key=lambda way: way[0].nbytes)
    array, held = wanted[id(objects[-1])], objects[depth - 1]
    name = "".join(first.path[:depth])
    return Holding(
        name=name,
        nbytes=sum(way.nbytes for way, _ in ways),
        count=len(ways),
        container="Array" if held is objects[-1] else type(held).__name__,
        largest="".join(first.path),
        largest_bytes=first.nbytes,
        shape=tuple(array.shape),
        dtype=str(array.dtype),
        source=made_at(array),
        scope=scope,
        reachable=" (" not in name and "{...}" not in name,
    )


def _referred(rest: Sequence[Any], ours: Sequence[Any], until: float) -> list[Holding]:
    """Arrays that no variable leads to, by what refers to them.

    Args:
        rest: the arrays.
        ours: containers of this module and its callers that hold them as well.
        until: when to stop looking.
    """
    groups: dict[str, list[Any]] = {}
    left = _MOST_UNNAMED
    for array in rest:  # The pairs of enumerate would refer to it, too.
        is_late = time.perf_counter() >= until
        name = _LATE if is_late else _NOBODY
        if left > 0 and not is_late:
            name = _referrer(array, {*map(id, (rest, *ours)), *map(id, groups.values())})
        left -= 1
        groups.setdefault(name, []).append(array)
    named = []
    for name, arrays in groups.items():
        kinds = [kind_of(array) for array in arrays]
        named.append(
            Holding(
                name=name,
                nbytes=sum(kind.nbytes for kind in kinds),
                count=len(arrays),
                container="",
                largest=name,
                largest_bytes=kinds[0].nbytes,
                shape=kinds[0].shape,
                dtype=kinds[0].dtype,
                source=made_at(arrays[0]),
                reachable=False,
            )
        )
    return named


def _referrer(array: Any, ignored: Set[int]) -> str:
    """The first thing that refers to an array, in words."""
    for referrer in gc.get_referrers(array):
        if id(referrer) in ignored:
            continue
        kind = type(referrer)  # What it says of itself may run code.
        if kind is types.FrameType:
            if is_library(referrer.f_code.co_filename):
                continue
            return f"a variable of {referrer.f_code.co_name}, which a traceback or generator keeps"
        if kind in (list, tuple, set, dict):
            return f"a {kind.__name__} of {len(referrer)} without a name"
        if kind is types.CellType:
            return "a closure without a name"
        return f"an object of type {kind.__name__}"
    return _NOBODY
