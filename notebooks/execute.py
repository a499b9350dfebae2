"""Execute the notebooks from their scripts: `make notebooks` writes them, `--check` compares.

Each notebook is a script (jupytext, py:percent), which people edit, and the same with outputs,
which people read. ``--check`` runs every script top to bottom and fails if one raises, takes longer
than its limit, is not what the committed notebook has, or answers in another form.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
LIMIT_SECONDS = 180


def scripts() -> list[Path]:
    """The scripts of the notebooks, in their order."""
    return sorted(FOLDER.glob("[0-9]_*.py"))


def unexecuted(script: Path) -> nbformat.NotebookNode:
    """The notebook of a script, without outputs; its cells have numbers as ids."""
    notebook = jupytext.read(script)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


def execute(script: Path) -> nbformat.NotebookNode:
    """The notebook of a script with its outputs."""
    notebook = unexecuted(script)
    client = NotebookClient(
        notebook,
        timeout=LIMIT_SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    notebook.metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": notebook.metadata["kernelspec"],
    }
    return notebook


def form(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """What kinds of outputs each cell has; what is in them differs between machines."""
    return [
        [f"{o.output_type} {o.get('name', '')}{sorted(o.get('data', {}))}" for o in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def sources(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """The cells of a notebook, without outputs."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def problems(script: Path, found: nbformat.NotebookNode, seconds: float) -> list[str]:
    """What is wrong with a committed notebook, seen from a fresh one."""
    committed = script.with_suffix(".ipynb")
    if not committed.exists():
        return [f"{committed.name} is missing"]
    known = nbformat.read(committed, as_version=4)
    wrong = []
    if sources(known) != sources(found):
        wrong.append(f"{committed.name} has other cells than {script.name}")
    elif form(known) != form(found):
        wrong.append(f"{committed.name} has outputs of another form than now")
    if seconds > LIMIT_SECONDS:
        wrong.append(f"{script.name} took {seconds:.0f} s; {LIMIT_SECONDS} are allowed")
    return wrong


def main() -> int:
    """Execute all notebooks, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # What is shown is what a machine without a GPU shows.
    wrong: list[str] = []
    for script in scripts():
        if options.names and not any(name in script.name for name in options.names):
            continue
        started = time.perf_counter()
        found = execute(script)
        seconds = time.perf_counter() - started
        print(f"{script.stem:32} {seconds:5.0f} s", flush=True)
        if options.check:
            wrong += problems(script, found, seconds)
        else:
            nbformat.write(found, script.with_suffix(".ipynb"))
    for problem in wrong:
        print(f"{problem}: run `make notebooks`", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
