"""`module:function` gives a step and its arguments, or one message that says what to write."""

from __future__ import annotations

import json
import sys

import pytest

from jaxmem import cli
from jaxmem.commands.entry import load_entry
from jaxmem.errors import EntryPointError
from tests.show.samples import HOSTILE


@pytest.mark.parametrize("entry", ["train:entry", "train.py:entry", "train:Runs.entry"])
def test_entries_that_work(entry):
    step, args = load_entry(entry)
    assert step(4) == 8
    assert args in ((1.0,), ())


def test_a_file_elsewhere_finds_its_neighbours(tmp_path):
    other = tmp_path / "other place"
    other.mkdir()
    (other / "json.py").write_text("import near\ndef entry(): return near.step, (near.x,)\n")
    (other / "near.py").write_text("x = 5\ndef step(x): return x\n")
    step, args = load_entry(f"{other}/json.py:entry")
    assert step(*args) == 5
    assert sys.modules["json"] is json


def test_classes_of_a_file_can_be_found_again(tmp_path):
    (tmp_path / "state.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass State:\n    x: 'int' = 3\n"
        "def entry(): return State, ()\n"
    )
    made, _ = load_entry("state.py:entry")
    assert getattr(sys.modules[made.__module__], made.__name__) is made


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("train", r"'train' is not module:function. Use for example train:entry or"),
        (":entry", r"':entry' is not module:function"),
        ("train:", r"'train:' is not module:function"),
        ("trian:entry", r"no module 'trian' here or on the Python path. Did you mean train\?"),
        ("json.decode:x", r"no module 'json.decode' .* Did you mean decoder or encoder"),
        ("train.deep:x", r"no module 'train.deep'"),
        ("trian.py:entry", r"there is no file trian.py. Did you mean train.py\?"),
        ("none/at/all.py:entry", r"there is no file none/at/all.py\.$"),
        ("train:entri", r"train has no 'entri'. Did you mean entry"),
        ("train:zzz", r"train has no 'zzz'. There is Runs, entry, entry_with_arguments, fails,"),
        ("train:Runs.zzz", r"train\.Runs has no 'zzz'. There is entry\.$"),
        ("train:config.zzz", r"train\.config has no 'zzz'\.$"),
        ("train:config", r"train:config is of type dict, not a function"),
        ("train:entry_with_arguments", r"cannot be called without arguments \(missing a required"),
        ("train:three", r"returned a tuple of 3. It must return \(step, example_args\)"),
        ("train:nothing", r"returned NoneType. It must"),
        ("train:no_step", r"returned a step of type int. It must"),
        ("train:no_tuple", r"returned example_args of type list, not a plain tuple"),
        ("train:leaves", r"train:leaves raised SystemExit: bye"),
    ],
)
def test_bad_entries(entry, message):
    with pytest.raises(EntryPointError, match=message):
        load_entry(entry)


def test_a_named_tuple_is_not_a_list_of_arguments(tmp_path):
    (tmp_path / "named.py").write_text(
        "import collections\nState = collections.namedtuple('State', 'a b')\n"
        "def entry(): return print, State(1, 2)\n"
    )
    with pytest.raises(EntryPointError, match="example_args of type State, not a plain tuple"):
        load_entry("named:entry")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ny = 1 / 0\n", "raised ZeroDivisionError: division by zero\n  {}:2 (<module>): y"),
        ("import no_such_thing\n", "ModuleNotFoundError: No module named 'no_such_thing'\n  {}:1 "),
        ("def f(:\n", "raised SyntaxError: invalid syntax"),
        ("import json\njson.loads('{{')\n", "  {}:2 (<module>): json.loads('{{')"),
    ],
)
@pytest.mark.parametrize("entry", ["broken:entry", "broken.py:entry"])
def test_a_module_that_raises_shows_the_users_line(tmp_path, source, message, entry):
    path = tmp_path / "broken.py"
    path.write_text(source.format())
    with pytest.raises(EntryPointError) as raised:
        load_entry(entry)
    assert message.format(path) in str(raised.value)


def test_a_file_of_a_package_says_how_the_package_is_asked_for(tmp_path):
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "__init__.py").touch()
    (tmp_path / "nets" / "inner.py").write_text("from . import helper\ndef entry(): pass\n")
    told = r"inner.py:1 .*\n  The file is part of a package: .* use nets\.inner:entry\.$"
    with pytest.raises(EntryPointError, match=told):
        load_entry("nets/inner.py:entry")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_async_entry_is_told(tmp_path):
    (tmp_path / "waits.py").write_text("async def entry(): pass\n")
    with pytest.raises(EntryPointError, match="waits:entry is an async function"):
        load_entry("waits:entry")


def test_a_syntax_error_names_its_line(tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(EntryPointError, match=r"broken.py:2: def f\(:$"):
        load_entry("broken:entry")


def test_an_entry_that_raises_shows_the_users_line(capsys, tmp_path):
    assert cli.main(["plan", "train:fails"]) == 1
    source = (tmp_path / "train.py").read_text()
    line = source.splitlines().index('    raise ValueError("no data\\x1b[31m")') + 1
    assert capsys.readouterr().err.splitlines() == [
        "EntryPointError: train:fails raised ValueError: no data\\x1b[31m",
        f"  {tmp_path / 'train.py'}:{line} (fails): " + 'raise ValueError("no data\\x1b[31m")',
    ]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_entries_are_messages(name, capsys):
    assert cli.main(["plan", f"{name}:{name}"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("EntryPointError: ")
    assert "\x1b" not in err
