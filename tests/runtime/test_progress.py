"""Progress is for people at a terminal: a bar there, nothing where nobody looks, lines if asked."""

from __future__ import annotations

import io
import sys

import pytest

from jaxmem.runtime.progress import Part, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stderr(monkeypatch):
    def put(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "80")
        return stream

    return put


def test_a_terminal_gets_a_bar_that_is_gone_afterwards(stderr):
    stream = stderr(Terminal())
    with progress(None, "planning [red]step") as report:
        report("compiling the step as written")
        report(Part("compile 3 of at most 4", 2, 4))
    shown = stream.getvalue()
    assert "jaxmem: planning [red]step" in shown
    assert "━" in shown
    assert shown.endswith("\x1b[2K"), "the line is cleared"


@pytest.mark.parametrize("wanted", [None, False])
def test_nothing_elsewhere(stderr, wanted):
    stream = stderr(io.StringIO() if wanted is None else Terminal())
    with progress(wanted, "planning step") as report:
        report("compiling")
    assert stream.getvalue() == ""


def test_lines_where_they_are_asked_for(stderr):
    stream = stderr(io.StringIO())
    with progress(True, "planning step") as report:
        report("compiling")
        report(Part("compile 3 of at most 4", 2, 4))
    assert stream.getvalue().splitlines() == [
        "jaxmem: planning step: compiling",
        "jaxmem: planning step: compile 3 of at most 4",
    ]


def test_a_process_without_standard_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress(None, "planning step") as report:
        report("compiling")
