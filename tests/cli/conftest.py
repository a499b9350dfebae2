"""A directory of the user's to run the command line in, and a planner that only notes its calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import jaxmem

TRAIN = """
def step(x):
    return x * 2

def entry():
    print("loading")
    return step, (1.0,)

def entry_with_arguments(model, batch):
    return step, (model, batch)

def three(): return step, (1.0,), {}
def nothing(): pass
def no_step(): return 3, (1.0,)
def no_tuple(): return step, [1.0]
def leaves(): raise SystemExit("bye")
config = {}
class Runs:
    @staticmethod
    def entry(): return step, ()

def fails():
    shape = 3
    raise ValueError("no data\\x1b[31m")
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An own directory with a train.py; what loading it changes is undone."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def planning(monkeypatch):
    """`jaxmem.plan` and `analyze` that note how they were called; `.answer` is what they do."""
    calls = SimpleNamespace(seen=[], answer=None)

    def respond(fun, *args, **options):
        calls.seen.append((fun.__name__, args, options))
        if isinstance(calls.answer, BaseException):
            raise calls.answer
        return calls.answer(fun, *args) if callable(calls.answer) else calls.answer

    monkeypatch.setattr(jaxmem, "plan", respond)
    monkeypatch.setattr(jaxmem, "analyze", respond)
    return calls
