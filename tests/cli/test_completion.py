"""Shells complete commands, entries and targets; they are asked as argcomplete asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmem
from jaxmem import cli
from jaxmem.commands import completion

ROOT = Path(__file__).parent.parent.parent


def completions(line: str) -> list[str]:
    """What a shell would offer at the end of a line."""
    with Path("answer").open("w") as answer:
        done = subprocess.run(
            ["bash", "-c", f'exec 8>answer 9>/dev/null; exec "{sys.executable}" -m jaxmem'],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "_ARGCOMPLETE": "1",
                "_ARGCOMPLETE_SUPPRESS_SPACE": "0",
                "_ARGCOMPLETE_IFS": "\n",
                "_ARGCOMPLETE_SHELL": "fish",
                "COMP_LINE": line,
                "COMP_POINT": str(len(line)),
            },
            stdout=answer,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    return [word.split("\t")[0] for word in Path("answer").read_text().split("\n")]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_has_a_script(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "jaxmem" in script
    if shell != "fish":  # bash and zsh share one, which sh can at least read
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("line", "offered", "withheld"),
    [
        ("jaxmem ", {"doctor", "plan", "diff", "bench", "completion"}, set()),
        ("jaxmem pl", {"plan"}, {"doctor"}),
        ("jaxmem plan --b", {"--budget"}, {"--target"}),
        ("jaxmem plan tr", {"train.py:"}, set()),
        ("jaxmem plan train.py:", {"train.py:entry"}, {"train.py:entry_with_arguments"}),
        ("jaxmem plan train:en", {"train:entry"}, {"train:nothing"}),
        ("jaxmem plan train:entry --target h", {"h100", "h200"}, {"a100-40"}),
        ("jaxmem plan train:entry --target 4x8xh2", {"4x8xh200"}, {"4x8xh100"}),
        ("jaxmem diff o", {"one.json"}, set()),
    ],
)
def test_what_is_offered(workplace, line, offered, withheld):
    (workplace / "one.json").touch()
    found = {word.strip() for word in completions(line)}
    assert offered <= found
    assert not withheld & found


def test_top_offers_what_tracks_itself_and_files_of_samples(workplace, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "cache"))
    (workplace / "run.jsonl").touch()
    with jaxmem.track("epoch"):
        found = {word.strip() for word in completions("jaxmem top ")}
        assert {str(os.getpid()), "run.jsonl"} <= found
        assert str(os.getpid()) in {w.strip() for w in completions(f"jaxmem top {os.getpid()}")}


@pytest.mark.parametrize("prefix", ["no/such/folder/", "broken.py:", "none.py:", "train.py:x:"])
def test_what_cannot_be_read_offers_nothing(workplace, prefix):
    (workplace / "broken.py").write_text("def f(:\n")
    assert list(completion.entries(prefix)) == []


def test_without_argcomplete_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert cli.main(["completion", "bash"]) == 1
    assert 'pip install "jaxmem[completion]"' in capsys.readouterr().err
