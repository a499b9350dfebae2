"""Expressions of the user's code are looked up without running any of it."""

from __future__ import annotations

import ast
import functools
import sys

import pytest

from jaxmem.monitor.oom.names import Names, UnknownError


class Lazy:
    def __init__(self):
        self.ran: list[str] = []

    @property
    def asked(self) -> str:
        self.ran.append("property")
        return "asked"

    @functools.cached_property
    def kept(self) -> str:
        self.ran.append("cached property")
        return "kept"


def test_looking_at_the_arguments_of_a_call_runs_no_code():
    lazy = Lazy()
    names = Names(sys._getframe())
    for text in ("lazy.asked", "lazy.kept"):
        with pytest.raises(UnknownError):
            names.value(ast.parse(text, mode="eval").body)
    assert lazy.ran == []
    lazy.kept = "here"  # What is there already is read.
    assert names.value(ast.parse("lazy.kept", mode="eval").body) == "here"
