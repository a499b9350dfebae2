"""The command line on a real step: nothing is replaced."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmem import cli
from jaxmem.monitor import doctor
from jaxmem.planner.plan import Plan

ROOT = Path(__file__).parent.parent.parent
TRAIN = """
import jax
import jax.numpy as jnp

def loss(w, x):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return (x**2).mean()

def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)

def entry():
    return step, (jnp.eye(64), jax.ShapeDtypeStruct((512, 64), jnp.float32))

def mismatched():
    return step, (jnp.eye(64), jax.ShapeDtypeStruct((512, 32), jnp.float32))

def not_arrays():
    return step, ("w", "x")
"""


@pytest.fixture(autouse=True)
def train(workplace):
    (workplace / "real.py").write_text(TRAIN)


def test_analyze(capsys):
    assert cli.main(["analyze", "real:entry", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["argument_bytes"] == 4 * (64 * 64 + 512 * 64)
    assert report["output_bytes"] == 4 * 64 * 64
    assert report["peak_bytes"] > report["argument_bytes"] + 6 * 4 * 512 * 64
    assert cli.main(["analyze", "real:entry"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step on cpu\npeak ")
    assert "real.py:7 (loss)" in out


def test_a_plan_that_fits_and_the_smallest_that_does(capsys, workplace):
    assert cli.main(["plan", "real:entry", "--budget", "64MiB", "-o", "plan.json"]) == 0
    assert "unchanged: keep-all fits" in capsys.readouterr().out
    assert Plan.load(workplace / "plan.json").budget_bytes == 64 * 2**20

    assert cli.main(["plan", "real:entry", "--budget", "200KiB", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert (answer["fits"], answer["budget_bytes"]) == (False, 200 * 2**10)
    assert answer["smallest_bytes"] > 200 * 2**10
    assert answer["holders"]
    smallest = str(answer["smallest_bytes"])
    assert cli.main(["plan", "real:entry", "--budget", smallest, "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out).compiled_bytes <= answer["smallest_bytes"]


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["real:entry", "--budget", "7 apples"], "BudgetError: '7 apples' is not a size", 64),
        (["real:entry", "--target", "h2oo"], "UnknownTargetError: ", 64),
        (["real:not_arrays"], "ArgumentError: ", 1),
    ],
)
def test_errors_of_planning_are_one_message(capsys, words, message, code):
    assert cli.main(["plan", *words]) == code
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert "Traceback" not in err


def test_a_step_that_does_not_trace_shows_its_own_line(capsys):
    assert cli.main(["plan", "real:mismatched"]) == 1
    err = capsys.readouterr().err
    assert "real.py:7 (loss): x = jnp.tanh(x @ w)" in err
    assert "Traceback" not in err


def test_doctor(capsys, monkeypatch):
    found = doctor.diagnose()
    monkeypatch.setattr(doctor, "diagnose", lambda **_: dataclasses.replace(found, problems=[]))
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jax"] == found.jax
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith(f"python         {found.python}\n")

    problem = doctor.Problem("no \x1b[31mGPU", "buy one")
    monkeypatch.setattr(
        doctor, "diagnose", lambda **_: dataclasses.replace(found, problems=[problem])
    )
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("problem: no \\x1b[31mGPU\n    fix: buy one\n")


def test_the_wheels_for_planning_do_not_make_jax_noisy(workplace):
    # Without JAX_PLATFORMS, and without an NVIDIA driver, JAX prints the traceback of a plugin
    # that cannot find its CUDA libraries; the user's own jnp.eye() is what starts JAX here.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    del environment["JAX_PLATFORMS"]
    command = [sys.executable, "-m", "jaxmem", "analyze", "real:entry"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "plugin configuration error" not in done.stderr
    assert "Traceback" not in done.stderr
