"""Holds the layout: imports point one way, jax internals stay in one file, the face stays small."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxmem"

# A part may import itself and parts of a lower level; parts of one level do not know each other.
LEVELS = {
    "errors": 0,
    "displayed": 0,
    "files": 0,
    "_before_jax": 2,
    "units": 1,
    "attending": 1,
    "work": 1,
    "_compat": 1,
    "processes": 2,
    "targets": 3,
    "program": 3,
    "hlo": 3,
    "policies": 4,
    "planner": 5,
    "rewrite": 6,
    "runtime": 7,
    "state": 8,
    "monitor": 8,
    "planning": 8,
    "fitted": 9,
    "fit": 10,
    "store": 9,
    "inference": 9,
    "compress": 9,
    "beforehand": 10,
    "benched": 10,
    "frontier": 10,
    "__init__": 11,
    "show": 12,
    "commands": 13,
    "cli": 14,
    "__main__": 15,
}
# Methods that Python, rich or Jupyter call to show an object, and the one that writes it as a page;
# they may import `show` when called.
DISPLAY_HOOKS = {"__str__", "__rich__", "_repr_html_", "_repr_mimebundle_", "to_html"}
# What `import jaxmem` must not load: it is slow, or the user may not have it.
LAZY = {"equinox", "flax", "matplotlib", "optax", "orbax", "rich", "scipy"}
MAX_EXPORTS = 25
MAX_LINES = 450


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The part a file belongs to: its folder or, directly in the package, its own name."""
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def modules_named(node: ast.AST, package: list[str]) -> list[str]:
    """Dotted names that an import statement loads; `package` resolves relative imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = package[: len(package) - node.level + 1] if node.level else []
    module = ".".join([*base, *([node.module] if node.module else [])])
    return [f"{module}.{alias.name}" for alias in node.names]


def imports(path: Path, source: str) -> Iterator[tuple[int, str, str]]:
    """`(line, dotted name, innermost function or "")` of every import, also inside functions."""
    package = list(path.relative_to(ROOT).parent.parts)

    def walk(node: ast.AST, function: str) -> Iterator[tuple[int, str, str]]:
        for name in modules_named(node, package):
            yield node.lineno, name, function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    return walk(ast.parse(source), "")


def imported_part(name: str) -> str | None:
    """The part of jaxmem a dotted name belongs to; names of the public face are `__init__`."""
    root, _, rest = name.partition(".")
    if root != "jaxmem":
        return None
    first = rest.partition(".")[0]
    is_part = (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file()
    return first if first and is_part else "__init__"


def wrong_imports(path: Path, source: str) -> list[str]:
    """Imports of a file that point up or sideways."""
    part = part_of(path)
    wrong = []
    for line, name, function in imports(path, source):
        other = imported_part(name)
        if other is None or other == part:
            continue
        if other == "show" and function in DISPLAY_HOOKS:
            continue
        if LEVELS[other] >= LEVELS[part]:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} imports {other} ({name})")
    return wrong


def internal_uses(path: Path, source: str) -> list[str]:
    """Places of a file that import or reach into jax._src."""
    lines = [n for n, name, _ in imports(path, source) if f"{name}.".startswith("jax._src.")]
    lines += [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src"
    ]
    return [f"{path.relative_to(ROOT)}:{line}: jax._src" for line in sorted(lines)]


def test_every_part_has_a_level():
    parts = {part_of(path) for path in package_files()}
    assert len(parts) > 3
    assert parts <= LEVELS.keys(), "give the new part its place in LEVELS and in the design"


def test_imports_point_one_way():
    wrong = [line for path in package_files() for line in wrong_imports(path, path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("planner/x.py", "from jaxmem.rewrite.emit import emit"),
        ("planner/x.py", "def f():\n    import jaxmem.rewrite"),
        ("planner/x.py", "from jaxmem import rewrite"),
        ("planner/x.py", "from ..rewrite import emit"),
        ("planner/x.py", "import jaxmem"),
        ("planner/x.py", "from jaxmem.show.terminal import plan_text"),
        ("planner/x.py", "def explain(self):\n    from jaxmem.show.terminal import plan_text"),
        ("planner/x.py", "if TYPE_CHECKING:\n    from jaxmem.rewrite import emit"),
        ("targets/x.py", "from jaxmem.program import trace"),
        ("program/x.py", "from jaxmem.targets import Target"),
        ("errors.py", "from jaxmem.units import format_bytes"),
        ("__init__.py", "from jaxmem.show import terminal"),
    ],
)
def test_an_import_that_points_up_is_found(file: str, source: str):
    assert len(wrong_imports(PACKAGE / file, source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("planner/x.py", "from jaxmem.program.ir import Op\nfrom jaxmem.units import parse_bytes"),
        ("planner/x.py", "from .plan import Plan\nfrom . import plan"),
        ("planner/x.py", "def __str__(self):\n    from jaxmem.show.terminal import plan_text"),
        ("planner/x.py", "import jax.numpy as jnp\nimport numpy"),
        ("cli.py", "def main():\n    import jaxmem\n    from jaxmem.show import terminal"),
    ],
)
def test_an_import_that_points_down_is_allowed(file: str, source: str):
    assert wrong_imports(PACKAGE / file, source) == []


def test_jax_internals_only_in_compat():
    folders = [ROOT / name for name in ("jaxmem", "tests", "examples")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    files.remove(PACKAGE / "_compat.py")
    uses = [use for path in files for use in internal_uses(path, path.read_text())]
    assert not uses, "\n".join(uses)


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax import _src",
        "def f():\n    from jax._src.core import Jaxpr",
        "import jax\njax._src.core.Jaxpr",
    ],
)
def test_a_use_of_jax_internals_is_found(source: str):
    assert len(internal_uses(PACKAGE / "fit.py", source)) == 1


def test_files_stay_short():
    folders = ("jaxmem", "tests", "examples", "benchmarks")
    files = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > len(package_files()) > 0
    long = {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MAX_LINES}
    assert not long, "look for the second idea in these"


def own_docstring(value: object) -> str:
    """What someone wrote about the object; for an instance, about its class."""
    described = value if isinstance(value, ModuleType | type) or callable(value) else type(value)
    doc = vars(described).get("__doc__") if isinstance(described, type) else described.__doc__
    generated = isinstance(described, type) and (doc or "").startswith(f"{described.__name__}(")
    return "" if generated else inspect.cleandoc(doc or "")


def test_the_public_face_is_small_and_documented():
    import jaxmem

    names = jaxmem.__all__
    assert 0 < len(names) <= MAX_EXPORTS
    assert len(set(names)) == len(names)
    undocumented = [name for name in names if not own_docstring(getattr(jaxmem, name))]
    assert not undocumented
    public = {
        name
        for name, value in vars(jaxmem).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert public <= set(names), "public, but not in __all__"


def test_a_missing_docstring_is_found():
    @dataclass
    class Generated:
        name: str = ""

    class Written:
        """Written by hand."""

    class Inherited(Written):
        pass

    undocumented = (Generated, Generated(), Inherited, lambda: None)
    assert [own_docstring(value) for value in undocumented] == ["", "", "", ""]
    assert own_docstring(Written) == own_docstring(Written()) == "Written by hand."


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules loaded after a statement, in a fresh interpreter."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_importing_jaxmem_loads_no_optional_package():
    loaded = loaded_by("import jaxmem")
    assert "jaxmem" in loaded
    assert not LAZY & loaded


def test_a_loaded_package_is_seen():
    assert "rich" in loaded_by("import rich")
