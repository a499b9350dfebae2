"""Which call of a compiled function an exception came out of, and what it was given.

Frames know the column of the call that they are in (PEP 657), so its function and arguments can be
read off the source and looked up among the frame's variables. Nothing is called or computed.
"""

from __future__ import annotations

import ast
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.errors import is_library
from jaxmem.monitor.arrays import frames_of
from jaxmem.monitor.oom.names import Names, UnknownError


@dataclass(frozen=True, eq=False)
class Called:
    """A call of a jitted or fitted function in the user's code.

    Attributes:
        name: the expression that is called, such as ``"self.step"``.
        fun: what that is.
        args: positional arguments, ``kwargs`` those by name; ``None`` where one of them is not to
            be told without running code.
        kwargs: see ``args``.
        replaced: positions of the arguments whose variable gets a result of the call.
        line: ``file.py:line``.
        scope: the function that the call is in, ``""`` for a module.
    """

    name: str
    fun: Callable[..., Any]
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    replaced: tuple[int, ...]
    line: str
    scope: str


def user_frame(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The innermost entry of a traceback that is in the user's own code."""
    found = None
    while traceback is not None:
        if not is_library(traceback.tb_frame.f_code.co_filename):
            found = traceback
        traceback = traceback.tb_next
    return found


def line_of(traceback: types.TracebackType | None) -> str:
    """``file.py:line`` of the user's own line that an exception came through; ``""`` for none."""
    found = user_frame(traceback)
    if found is None:
        return ""
    return f"{_file(found.tb_frame)}:{found.tb_lineno}"


def find(traceback: types.TracebackType | None) -> Called | None:
    """The call that an exception came out of; ``None`` if it is not one of a jitted function."""
    entry = user_frame(traceback)
    if entry is None:
        return None
    parsed = _call_at(entry.tb_frame, entry.tb_lasti)
    if parsed is None:
        return None
    return _called(entry.tb_frame, *parsed, _is_compiled) or _earlier(entry.tb_frame, parsed[0])


def going_on(fun: Any) -> Called | None:
    """The call of ``fun`` that goes on in the innermost frame of the user's own code."""
    frame = _frame_here()
    parsed = None if frame is None else _call_at(frame, frame.f_lasti)
    if frame is None or parsed is None:
        return None
    return _called(frame, *parsed, lambda found: getattr(found, "__func__", found) is fun)


def line_here() -> str:
    """``file.py:line`` that the innermost frame of the user's own code is at; ``""`` for none."""
    frame = _frame_here()
    return "" if frame is None else f"{_file(frame)}:{frame.f_lineno}"


def _frame_here() -> types.FrameType | None:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _earlier(frame: types.FrameType, waiting: ast.Call) -> Called | None:
    """The call that made what another one waits for, such as ``block_until_ready(loss)``.

    Programs run on their own once they are started, and what fails in them is raised where a result
    is read. An array knows the line that it was made in, and that may be one of the same function.
    """
    names = Names(frame)
    read = list(waiting.args)
    if isinstance(waiting.func, ast.Attribute):
        read.append(waiting.func.value)
    for node in read:
        try:
            leaves = jax.tree.leaves(names.value(node))
        except (UnknownError, ValueError):
            continue
        for leaf in leaves:
            made = next((f for f in frames_of(leaf) if not is_library(f.filename)), None)
            if made is None or made.filename != frame.f_code.co_filename:
                continue
            for call, statement in _calls_in(frame, made.line):
                called = _called(frame, call, statement, _is_compiled)
                if called is not None:
                    return called
    return None


def _calls_in(frame: types.FrameType, line: int) -> Iterator[tuple[ast.Call, ast.AST]]:
    """The calls that begin or end in a line, with their statements."""
    tree = _tree_of(frame)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Call) and line in (node.lineno, node.end_lineno):
            assert tree is not None
            yield node, _innermost(tree, node)


def _called(
    frame: types.FrameType, call: ast.Call, statement: ast.AST, wanted: Callable[[Any], bool]
) -> Called | None:
    """A call in a frame, if what is called is ``wanted``."""
    names = Names(frame)
    try:
        fun = names.value(call.func)
    except UnknownError:
        return None
    if not wanted(fun):
        return None
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] = {}
    try:
        args = names.values(call.args)
        for keyword in call.keywords:
            value = names.value(keyword.value)
            kwargs.update({keyword.arg: value} if keyword.arg else value)
    except UnknownError:
        args, kwargs = None, {}
    given = [ast.unparse(argument) for argument in call.args]
    targets = _targets(statement)
    return Called(
        name=ast.unparse(call.func),
        fun=fun,
        args=args,
        kwargs=kwargs,
        replaced=tuple(n for n, text in enumerate(given) if text in targets),
        line=f"{_file(frame)}:{call.lineno}",
        scope="" if frame.f_code.co_name == "<module>" else frame.f_code.co_name,
    )


def _is_compiled(fun: Any) -> bool:
    """Whether it is a jitted function, or wraps one as ``nnx.jit`` does."""
    inner = getattr(fun, "jitted_fn", fun)
    return inner is not None and _compat.is_jitted(inner)


def _file(frame: types.FrameType) -> str:
    return frame.f_code.co_filename.rsplit("/", 1)[-1]


def _tree_of(frame: types.FrameType) -> ast.AST | None:
    """The source of a frame's file; ``None`` where there is none, or it has changed."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        return ast.parse(source) if source else None
    except (SyntaxError, ValueError):
        return None


def _call_at(frame: types.FrameType, instruction: int) -> tuple[ast.Call, ast.AST] | None:
    """The call that a frame was in at an instruction, and the statement that it is part of."""
    position = next(islice(frame.f_code.co_positions(), instruction // 2, None), None)
    tree = _tree_of(frame)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Call):
            where = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            if where == position:
                assert tree is not None
                return node, _innermost(tree, node)
    return None


def _innermost(tree: ast.AST, call: ast.Call) -> ast.AST:
    """The smallest statement that has the call in it."""
    for child in ast.walk(tree):
        if isinstance(child, ast.stmt) and child is not tree:
            if any(node is call for node in ast.walk(child)):
                return _innermost(child, call)
    return tree


def _targets(statement: ast.AST) -> set[str]:
    """Variables that a statement assigns to."""
    assigned = statement.targets if isinstance(statement, ast.Assign) else []
    parts = list(assigned)
    found = set()
    while parts:
        part = parts.pop()
        if isinstance(part, ast.Tuple | ast.List):
            parts += part.elts
        else:
            found.add(ast.unparse(part))
    return found
