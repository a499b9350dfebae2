"""Look expressions up among the variables of a frame, without calling anything."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

from jaxmem.monitor.holders import variables_of


class UnknownError(Exception):
    """An expression that cannot be told without running code."""


class Names:
    """Looks expressions up among the variables of a frame."""

    def __init__(self, frame: types.FrameType):
        self.spaces: tuple[Mapping[str, Any], ...] = (variables_of(frame), frame.f_globals)

    def values(self, nodes: list[ast.expr]) -> tuple[Any, ...]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found += self.value(node.value)
            else:
                found.append(self.value(node))
        return tuple(found)

    def value(self, node: ast.expr) -> Any:
        """What an expression stands for.

        Raises:
            UnknownError: it calls something, or is not there.
        """
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._variable(name)
            case ast.Attribute(value=base, attr=name):
                return _attribute(self.value(base), name)
            case ast.Subscript(value=base, slice=key):
                return _item(self.value(base), self.value(key))
            case ast.Tuple(elts=parts):
                return self.values(parts)
            case ast.List(elts=parts):
                return list(self.values(parts))
            case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
                names = [self.value(key) for key in keys if key is not None]
                return dict(zip(names, self.values(values), strict=True))
        raise UnknownError

    def _variable(self, name: str) -> Any:
        for space in self.spaces:
            if name in space:
                return space[name]
        raise UnknownError


def _item(holder: Any, key: Any) -> Any:
    if not isinstance(holder, dict | list | tuple):
        raise UnknownError
    try:
        return holder[key]
    except (KeyError, IndexError, TypeError) as error:
        raise UnknownError from error


def _attribute(base: Any, name: str) -> Any:
    """An attribute, unless looking it up runs code of the user's."""
    if isinstance(base, types.ModuleType):
        kept = vars(base)
        if name in kept:
            return kept[name]
        raise UnknownError
    try:
        found = inspect.getattr_static(base, name)
    except AttributeError as error:
        raise UnknownError from error
    if isinstance(found, property | functools.cached_property):
        raise UnknownError
    return getattr(base, name)
