"""What tests of several parts of the runtime use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxmem.program.calling import Caller
from jaxmem.runtime import compiler


@pytest.fixture
def compiles(monkeypatch) -> list[str]:
    """The names of the targets that programs are compiled for in a test, in order."""
    found, real = [], compiler.compile_for

    def counted(target, *args, **options):
        found.append(target.name)
        return real(target, *args, **options)

    monkeypatch.setattr(compiler, "compile_for", counted)
    return found


@pytest.fixture
def taken(monkeypatch) -> Callable[[], int]:
    """How many calls were taken apart since it was last asked."""
    count = 0
    take = Caller.take

    def counting(self, *call):
        nonlocal count
        count += 1
        return take(self, *call)

    def since() -> int:
        nonlocal count
        found, count = count, 0
        return found

    monkeypatch.setattr(Caller, "take", counting)
    return since
