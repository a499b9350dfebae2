"""``jaxmem completion``: the script that makes a shell complete commands, entries and targets.

argcomplete asks this program itself at each TAB, so what it offers cannot be out of date.
"""

from __future__ import annotations

import ast
import json
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from jaxmem.commands import exits
from jaxmem.errors import MissingExtraError

HELP = "print the script that completes commands in a shell"
SHELLS = ("bash", "zsh", "fish")
HOW = """\
bash:  eval "$(jaxmem completion bash)"        in ~/.bashrc
zsh:   eval "$(jaxmem completion zsh)"         in ~/.zshrc, after compinit
fish:  jaxmem completion fish | source         in ~/.config/fish/config.fish
"""


def add(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that you use")


def run(options: Namespace) -> int:
    """Print the script.

    Raises:
        MissingExtraError: argcomplete is not installed.
    """
    script = _argcomplete().shellcode(["jaxmem"], shell=options.shell)
    answer = json.dumps({"shell": options.shell, "script": script}) if options.json else script
    print(answer, file=options.answer)
    return exits.FITS


def answer(parser: ArgumentParser) -> None:
    """Answer the shell, and end the process; called where argcomplete's script has asked."""
    _argcomplete().autocomplete(parser)


def _argcomplete() -> Any:
    try:
        import argcomplete
    except ImportError as error:
        raise MissingExtraError(
            'completion needs argcomplete: pip install "jaxmem[completion]"'
        ) from error
    return argcomplete


def completed(action: Action, completer: Callable[..., Iterable[str]]) -> None:
    """Let a function complete the values of an option."""
    action.completer = completer  # pyright: ignore[reportAttributeAccessIssue]


def entries(prefix: str, **_: Any) -> Iterator[str]:
    """Files of Python, folders, and after a colon functions; nothing is imported."""
    place, colon, _name = prefix.rpartition(":")
    if colon:
        file = Path(place if place.endswith(".py") else f"{place.replace('.', '/')}.py")
        yield from (f"{place}:{name}" for name in _functions(file))
        return
    folder = Path(prefix) if prefix.endswith("/") else Path(prefix).parent
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.suffix == ".py":
            yield f"{path}:"
        elif path.is_dir() and path.name[0] not in "._":
            yield f"{path}/"


def plans_and_entries(prefix: str, **_: Any) -> Iterator[str]:
    """Files that may be plans, and entries."""
    folder = Path(prefix) if prefix.endswith("/") else Path(prefix).parent
    yield from map(str, sorted(folder.glob("*.json")))
    yield from entries(prefix)


def tracked(prefix: str, **_: Any) -> Iterator[str]:
    """Processes that track themselves, and files of samples."""
    from jaxmem.monitor.published import everyone

    yield from (str(found.pid) for found in everyone())
    folder = Path(prefix) if prefix.endswith("/") else Path(prefix).parent
    yield from map(str, sorted(folder.glob("*.jsonl")))


def _functions(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
    # Those that can be called without arguments: only they can be entries.
    return [
        n.name
        for n in found
        if len(n.args.posonlyargs + n.args.args) == len(n.args.defaults)
        and all(default is not None for default in n.args.kw_defaults)
    ]


def targets(prefix: str, **_: Any) -> list[str]:
    """The GPUs of the table, behind the number that was typed."""
    count, times, _name = prefix.rpartition("x")
    text = (resources.files("jaxmem") / "targets" / "gpus.json").read_text(encoding="utf-8")
    return [f"{count}{times}{name}" for name in json.loads(text)["gpus"]] + ["cpu"]
