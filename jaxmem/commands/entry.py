"""``module:function`` on the command line: the user's step and its example arguments."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxmem.commands import completion
from jaxmem.errors import EntryPointError, JaxmemError, is_library

HELP = """\
module:function names a function of yours without arguments that returns (step, example_args):
the step to plan and a tuple of arguments for it, arrays or jax.ShapeDtypeStruct. The current
directory is searched first; a file works too: train.py:entry.

  def entry():
      tokens = jax.ShapeDtypeStruct((8, 2048), "int32")
      return train_step, (state, tokens)
"""
_PACKAGE = Path(__file__).parent.parent
_WANTED = "It must return (step, example_args), for instance: return train_step, (state, batch)"


def add(parser: ArgumentParser) -> None:
    """Declare ``module:function``."""
    entry = parser.add_argument(
        "entry", metavar="module:function", help="returns (step, example_args)"
    )
    completion.completed(entry, completion.entries)


def add_target(parser: ArgumentParser) -> None:
    """Declare ``--target``."""
    target = parser.add_argument(
        "--target", metavar="NAME", help='"h200", "8xh100"; default: this machine'
    )
    completion.completed(target, completion.targets)


def asked(options: Namespace, **settings: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step and the arguments that a command line names.

    Args:
        options: has the ``entry``.
        **settings: what is asked for the step, by option: a step that is fitted already would
            ignore it.

    Raises:
        EntryPointError: as :func:`load_entry`, or the step is fitted and something is asked for it.
    """
    step, args = load_entry(options.entry)
    from jaxmem.fitted import FittedStep
    from jaxmem.runtime.bound import BoundStep

    wanted = [f"--{name}" for name, value in settings.items() if value is not None]
    if wanted and isinstance(step, FittedStep | BoundStep):
        raise EntryPointError(
            f"{options.entry} returned a step that is fitted already, for its own budget and "
            f"target. Leave {' and '.join(wanted)} out, or return the step as it was written: "
            "step.__wrapped__"
        )
    return step, args


def load_entry(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the step and the example arguments that ``module:function`` gives.

    Raises:
        EntryPointError: there is no such module, file or function, it raised (the user's own
            line is in the message), or it returned something else.
    """
    place, _, function_name = name.rpartition(":")
    if not place or not function_name:
        raise EntryPointError(
            f"{name!r} is not module:function. Use for example train:entry or train.py:entry."
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _as_if_run(place):
        return _called(name, place, function_name)


@contextlib.contextmanager
def _as_if_run(place: str) -> Iterator[None]:
    """A module that reads its command line while it is imported must not read that of jaxmem."""
    given, sys.argv = sys.argv, [place]
    try:
        yield
    finally:
        sys.argv = given


def _called(
    name: str, place: str, function_name: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    module = _from_file(name, Path(place)) if place.endswith(".py") else _imported(name, place)
    function = _attribute(name, module, function_name)
    try:
        with contextlib.suppress(ValueError):  # some callables do not tell; calling them will
            inspect.signature(function).bind()
    except TypeError as error:
        raise EntryPointError(
            f"{name} cannot be called without arguments ({error}). {_WANTED}"
        ) from error
    with users_errors(name, always=True):
        found = function()
    return _checked(name, found)


def _from_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        files = [str(near) for near in sorted(path.parent.glob("*.py"))]
        raise EntryPointError(f"{name}: there is no file {path}.{_did_you_mean(str(path), files)}")
    sys.path.insert(0, str(path.parent.resolve()))
    # Its own name, so that classes can be found again, but never in place of another module.
    known = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    module_name = f"_jaxmem_{path.stem}" if known else path.stem
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    with users_errors(name, always=True):
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            # As a script it is not part of its package.
            if not module.__package__ and (path.parent / "__init__.py").is_file():
                dotted = f"{path.resolve().parent.name}.{path.stem}"
                function = name.rpartition(":")[2]
                raise EntryPointError(
                    f"{name} raised {type(error).__name__}: {error}{_users_line(error)}\n"
                    f"  The file is part of a package: from the folder above it, use "
                    f"{dotted}:{function}."
                ) from error
            raise
    return module


def _imported(name: str, module_name: str) -> ModuleType:
    with users_errors(name, always=True):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing != module_name and not module_name.startswith(f"{missing}."):
                raise  # one of the user's own imports
            parent, _, leaf = missing.rpartition(".")
            here = str(Path.cwd())
            folders = getattr(sys.modules.get(parent), "__path__", []) if parent else [here]
            near = [module.name for module in pkgutil.iter_modules(folders)]
            hint = _did_you_mean(leaf, near)
            raise EntryPointError(
                f"{name}: there is no module {missing!r} here or on the Python path.{hint}"
            ) from error


def _attribute(name: str, module: ModuleType, function_name: str) -> Callable[..., Any]:
    found: Any = module
    parts = function_name.split(".")
    for number, part in enumerate(parts):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            has = getattr(found, "__dict__", {})  # Numbers and the like have none.
            names = [n for n, v in has.items() if callable(v) and n[0] != "_"]
            hint = _did_you_mean(part, names)
            where = ".".join([module.__name__, *parts[:number]])
            raise EntryPointError(f"{name}: {where} has no {part!r}.{hint}") from error
    if not callable(found):
        kind = type(found).__name__
        raise EntryPointError(f"{name} is of type {kind}, not a function. {_WANTED}")
    return found


def _checked(name: str, found: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if inspect.iscoroutine(found):
        found.close()
        raise EntryPointError(f"{name} is an async function, which nothing waits for. {_WANTED}")
    if not isinstance(found, tuple) or len(found) != 2:
        what = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
        raise EntryPointError(f"{name} returned {what}. {_WANTED}")
    step, args = found
    if not callable(step):
        raise EntryPointError(f"{name} returned a step of type {type(step).__name__}. {_WANTED}")
    # A NamedTuple is one argument (an optimizer state, say), never the list of all of them.
    if not isinstance(args, tuple) or hasattr(args, "_fields"):
        kind = type(args).__name__
        raise EntryPointError(
            f"{name} returned example_args of type {kind}, not a plain tuple. {_WANTED}"
        )
    return step, args


def _did_you_mean(wanted: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(wanted, names, n=3)
    if near:
        return f" Did you mean {' or '.join(near)}?"
    return f" There is {', '.join(sorted(names)[:8])}." if names else ""


@contextlib.contextmanager
def users_errors(name: str, *, always: bool = False) -> Iterator[None]:
    """Turns what the user's code raised into one message with the user's own line.

    An error raised by jaxmem or JAX below no line of the user's is a bug of ours: unless
    ``always``, it passes with its traceback.
    """
    try:
        yield
    except JaxmemError:
        raise
    except (Exception, SystemExit) as error:
        where = _users_line(error)
        if not where and not always:
            raise
        raise EntryPointError(f"{name} raised {type(error).__name__}: {error}{where}") from error


def _users_line(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"\n  {error.filename}:{error.lineno}: {(error.text or '').strip()}"
    below: list[traceback.FrameSummary] = []
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(_PACKAGE):
            below = []
        elif not is_library(frame.filename):
            below.append(frame)
    if not below:
        return ""
    return f"\n  {below[-1].filename}:{below[-1].lineno} ({below[-1].name}): {below[-1].line}"
