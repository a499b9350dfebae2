"""What tests of several parts of the runtime use."""

from __future__ import annotations

import pytest

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
