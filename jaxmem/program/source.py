"""Names people recognise: source line, module path, checkpoint name of an operation."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import PurePath

from jaxmem import _compat
from jaxmem.program.ir import Block, Op, Value
from jaxmem.program.loops import Nest

_WRAPPED = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|rematted_computation|linearize)\(")


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Attributes:
        source: ``file.py:line (function)`` of the user's own line, ``""`` when unknown.
        module: module path from the name stack, ``""`` when there is none.
        checkpoint_name: name given by ``checkpoint_name``, ``""`` when there is none.
        primitive: the operation.
    """

    source: str
    module: str
    checkpoint_name: str
    primitive: str

    @property
    def label(self) -> str:
        """The shortest name a reader can find: checkpoint name, or operation and line."""
        where = self.source.split(" (")[0]
        what = self.checkpoint_name or self.primitive
        return f"{what} at {where}" if where else what


def origin_of(op: Op, name: str = "") -> Origin:
    """The origin of what ``op`` makes; ``name`` is its checkpoint name if it has one."""
    line = _compat.user_line(op.origin.eqn)
    source = f"{file_name(line[0])}:{line[1]} ({line[2]})" if line else ""
    return Origin(source, module_path(_compat.name_stack_of(op.origin.eqn)), name, op.name)


def file_name(path: str) -> str:
    """The name of a file as people know it: of a notebook's cell ``In[3]``, as it is shown there.

    >>> file_name("/home/someone/train.py")
    'train.py'
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # The name that a cell is compiled under is a hash in a folder for temporary files.
    cell = shell.compile.format_code_name(path) if shell is not None else None
    return cell[1] if cell else PurePath(path).name


def module_path(name_stack: str) -> str:
    """The module path in a name stack, without the names of JAX's own transformations.

    >>> module_path("transpose(jvp(Block_0))/mlp")
    'Block_0/mlp'
    >>> module_path("jvp()")
    ''
    """
    plain = _WRAPPED.sub("", name_stack).replace(")", "").replace("(", "")
    parts = [part for part in plain.split("/") if part and not part.startswith("jaxmem.")]
    return "/".join(part for part in parts if part not in ("rematted_computation", "checkpoint"))


def checkpoint_names(nest: Nest) -> dict[Value, str]:
    """The ``checkpoint_name`` of every value that has one, in all loops too."""
    names: dict[Value, str] = {}
    for inner in nest.walk():
        names.update(_named(inner.block))
    return names


def _named(block: Block) -> dict[Value, str]:
    names: dict[Value, str] = {}
    for op in block.ops:
        if op.name == "name":
            for value in (*op.values, *op.outputs):
                names[value] = op.eqn.params["name"]
    return names
