"""The command line: plan and analyse a step of your own files, and check the installation.

Exit codes: 0 it fits, 2 it does not fit, 64 the command line is wrong, 1 anything else.
Nothing here imports jax before a command needs it, so that ``jaxmem --help`` is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import jaxmem
from jaxmem.errors import (
    BudgetError,
    BudgetInfeasibleError,
    EntryPointError,
    JaxmemError,
    UnknownTargetError,
    is_library,
)

FITS, FAILED, DOES_NOT_FIT, WRONG_USAGE, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 64, 130, 141

_ENTRY_HELP = """\
module:function names a function of yours without arguments that returns (step, example_args):
the step to plan and a tuple of arguments for it, arrays or jax.ShapeDtypeStruct. The current
directory is searched first; a file works too: train.py:entry.

  def entry():
      tokens = jax.ShapeDtypeStruct((8, 2048), "int32")
      return train_step, (state, tokens)
"""
_WANTED = "It must return (step, example_args), for instance: return train_step, (state, batch)"
# What --budget and --target say; BudgetInfeasibleError is another thing.
_WRONG_OPTIONS = (BudgetError, UnknownTargetError)
_EXIT_HELP = "exit codes: 0 fits, 2 does not fit, 64 wrong usage, 1 any other error"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of a command line.

    Args:
        argv: the words after ``jaxmem``; those of this process by default.

    Raises:
        SystemExit: after ``--help`` and ``--version``, and with code 64 on wrong usage.
    """
    options = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if "utf" not in (stream.encoding or "utf").lower():
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    # With --json, what the user's own code prints must not end up in the JSON.
    options.messages = sys.stderr if options.json else sys.stdout
    try:
        code = _answered(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough; Python's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    return code


def _answered(options: argparse.Namespace) -> int:
    try:
        return options.run(options)
    except JaxmemError as error:
        if options.traceback:
            traceback.print_exception(error)
        if isinstance(error, BudgetInfeasibleError):
            _report_infeasible(error, options.json)
            return DOES_NOT_FIT
        if not options.traceback:
            print(_cleaned(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return WRONG_USAGE if isinstance(error, _WRONG_OPTIONS) else FAILED


def _cleaned(message: str) -> str:
    from jaxmem.show.rows import clean

    return "\n".join(clean(line, 2000) for line in message.split("\n"))


class _Parser(argparse.ArgumentParser):
    """Exits with 64 on wrong usage: argparse's own 2 means "does not fit" here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(WRONG_USAGE, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    look = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="jaxmem",
        description="Run any JAX train step inside a byte budget.",
        epilog=f"{_ENTRY_HELP}\n{_EXIT_HELP}",
        formatter_class=look,
    )
    parser.add_argument("--version", action="version", version=f"jaxmem {jaxmem.__version__}")
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON instead of tables")
    common.add_argument("--traceback", action="store_true", help="show where an error was raised")
    entry = _Parser(add_help=False)
    entry.add_argument("entry", metavar="module:function", help="returns (step, example_args)")
    entry.add_argument("--target", metavar="NAME", help='"h200", "8xh100"; default: this machine')

    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[..., int], help: str, *parents: Any) -> Any:
        made = commands.add_parser(
            name,
            help=help,
            description=help,
            parents=[*parents, common],
            epilog=f"{_ENTRY_HELP}\n{_EXIT_HELP}" if parents else _EXIT_HELP,
            formatter_class=look,
        )
        made.set_defaults(run=run)
        return made

    doctor = command(
        "doctor", _doctor, "say what is installed, what works, and how to fix the rest"
    )
    doctor.add_argument("--measure", action="store_true", help="measure the device's rates again")
    command("analyze", _analyze, "say where the peak of a step is and what fills it", entry)
    command("frontier", _frontier, "say what every budget would cost; nothing is compiled", entry)
    plan = command("plan", _plan, "say what to recompute so that a step fits a budget", entry)
    plan.add_argument(
        "--budget",
        metavar="SIZE",
        help='bytes on each device: 20GiB, 512MiB, "80%%"; default: all of the device',
    )
    plan.add_argument("-o", "--output", metavar="FILE", type=_writable, help="save the plan here")
    return parser


def _writable(name: str) -> Path:
    """Finds out before minutes of planning that the plan could not be saved."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{name!r} is not a file in an existing directory")
    return path


def _doctor(options: argparse.Namespace) -> int:
    _choose_platform()
    from jaxmem.monitor.doctor import diagnose

    with contextlib.redirect_stdout(options.messages):
        diagnosis = diagnose(measure=options.measure)
    if options.json:
        print(json.dumps(asdict(diagnosis), indent=1, sort_keys=True))
    else:
        print(_cleaned(str(diagnosis)))
    return FAILED if diagnosis.problems else FITS


def _analyze(options: argparse.Namespace) -> int:
    _choose_platform()
    with contextlib.redirect_stdout(options.messages):
        step, args = _entry(options)
        with _users_errors(options.entry):
            report = jaxmem.analyze(step, *args, target=options.target)
    _print(report, options.json)
    return FITS if report.compiled_bytes <= report.device_bytes else DOES_NOT_FIT


def _frontier(options: argparse.Namespace) -> int:
    _choose_platform()
    with contextlib.redirect_stdout(options.messages):
        step, args = _entry(options)
        with _users_errors(options.entry):
            curve = jaxmem.frontier(step, *args, target=options.target)
    from jaxmem.show.pages import frontier_page
    from jaxmem.show.terminal import page_view

    if options.json:
        print(curve.to_json())
    else:
        _show(lambda width: page_view(frontier_page(curve), width))
    return FITS if curve.points[0].peak_bytes <= curve.device_bytes else DOES_NOT_FIT


def _plan(options: argparse.Namespace) -> int:
    _choose_platform()
    with contextlib.redirect_stdout(options.messages):
        step, args = _entry(options, options.budget)
        with _users_errors(options.entry):
            plan = jaxmem.plan(step, *args, budget=options.budget, target=options.target)
    _print(plan, options.json)
    if options.output:
        try:
            plan.save(options.output)
        except OSError as error:
            raise EntryPointError(f"the plan cannot be saved: {error}") from error
    return FITS if plan.compiled_bytes <= plan.budget_bytes else DOES_NOT_FIT


def _entry(options: argparse.Namespace, budget: str | None = None) -> tuple[Any, tuple[Any, ...]]:
    step, args = load_entry(options.entry)
    from jaxmem.fitted import FittedStep

    # A fitted step is planned as it is fitted: what is asked for here would be ignored.
    if isinstance(step, FittedStep) and (budget or options.target):
        raise EntryPointError(
            f"{options.entry} returned a step that is fitted already, for its own budget and "
            "target. Leave --budget and --target out, or return the step as it was written: "
            "step.__wrapped__"
        )
    return step, args


def _choose_platform() -> None:
    """Keeps JAX quiet where only the wheels that plan for absent GPUs are installed.

    Without an NVIDIA driver JAX would still start their CUDA plugin and print its traceback
    before it falls back to the CPU. Only this process is told to use the CPU, only when the user
    has not chosen, and only when no other accelerator could be meant.
    """
    if os.environ.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu"):
        return
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins else None
    names = {module.name for module in pkgutil.iter_modules(folders)} if folders else set()
    if names and names <= {"xla_cuda12", "xla_cuda13"} and not _has_nvidia_driver():
        os.environ["JAX_PLATFORMS"] = "cpu"


def _has_nvidia_driver() -> bool:
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return False


def _print(found: jaxmem.Plan | jaxmem.MemoryReport, as_json: bool) -> None:
    from jaxmem.show.terminal import plan_view, report_view

    if as_json:
        print(found.to_json())
    elif isinstance(found, jaxmem.Plan):
        _show(lambda width: plan_view(found, width))
    else:
        _show(lambda width: report_view(found, width))


def _show(view: Callable[[int], Any], *, stderr: bool = False) -> None:
    from rich.console import Console

    from jaxmem.show.terminal import plain_text, print_view, terminal_width

    width = terminal_width()
    console = Console(width=width, stderr=stderr)
    if console.is_terminal:
        print_view(console, view(width))
    else:
        print(plain_text(view(width), width), file=sys.stderr if stderr else sys.stdout)


def _report_infeasible(error: BudgetInfeasibleError, as_json: bool) -> None:
    from jaxmem.show.terminal import infeasible_view

    if as_json:
        holders = [asdict(holder) for holder in error.holders]
        sizes = {"budget_bytes": error.budget_bytes, "smallest_bytes": error.smallest_bytes}
        found = {"fits": False, "error": str(error), **sizes, "holders": holders}
        print(json.dumps(found, indent=1, sort_keys=True))
    else:
        _show(lambda width: infeasible_view(error, width), stderr=True)


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
    module = _from_file(name, Path(place)) if place.endswith(".py") else _imported(name, place)
    function = _attribute(name, module, function_name)
    try:
        with contextlib.suppress(ValueError):  # some callables do not tell; calling them will
            inspect.signature(function).bind()
    except TypeError as error:
        raise EntryPointError(
            f"{name} cannot be called without arguments ({error}). {_WANTED}"
        ) from error
    with _users_errors(name, always=True):
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
    with _users_errors(name, always=True):
        spec.loader.exec_module(module)
    return module


def _imported(name: str, module_name: str) -> ModuleType:
    with _users_errors(name, always=True):
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
    for part in function_name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            names = [n for n, v in vars(found).items() if callable(v) and n[0] != "_"]
            hint = _did_you_mean(part, names)
            raise EntryPointError(f"{name}: {module.__name__} has no {part!r}.{hint}") from error
    if not callable(found):
        kind = type(found).__name__
        raise EntryPointError(f"{name} is of type {kind}, not a function. {_WANTED}")
    return found


def _checked(name: str, found: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
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
def _users_errors(name: str, *, always: bool = False) -> Iterator[None]:
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
        if Path(frame.filename).is_relative_to(Path(__file__).parent):
            below = []
        elif not is_library(frame.filename):
            below.append(frame)
    if not below:
        return ""
    return f"\n  {below[-1].filename}:{below[-1].lineno} ({below[-1].name}): {below[-1].line}"
