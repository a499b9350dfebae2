"""Holds the pinned environments to pyproject.toml, and the search for an interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("py311", "py312")


def pins(name: str) -> dict[str, str]:
    """The versions of a lock file; every line is `name==version` or a comment."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pairs = [re.fullmatch(r"([a-z0-9-]+)==([0-9][a-z0-9.+]*)", x) for x in lines if x[0] != "#"]
    assert all(pairs), f"{name}.txt has a line that is not an exact version"
    return {pair[1]: pair[2] for pair in pairs if pair}


def requirements(*extras: str) -> list[Requirement]:
    optional = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in optional[extra])]
    return [r for r in map(Requirement, texts) if r.name != "jaxmem"]


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_files_satisfy_the_package(python: str):
    locked = pins(python)
    for requirement in requirements("completion", "flax", "tracking", "test", "dev"):
        assert locked[requirement.name.lower()] in requirement.specifier


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", ["plan-gpu", "gpu"])
def test_compiler_wheels_match_jax(python: str, extra: str):
    wheels = pins(f"{extra}-{python}")
    jax_version = pins(python)["jax"]
    assert wheels["jax-cuda13-plugin"] == wheels["jax-cuda13-pjrt"] == jax_version


# What compiling for an absent GPU takes, and what nvidia-cuda-nvcc requires in turn (3 MB).
COMPILER = {"jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm"}
REQUIRED_BY_NVCC = {"nvidia-cuda-crt", "nvidia-cuda-runtime"}


@pytest.mark.parametrize("python", PYTHONS)
def test_planning_installs_a_whole_compiler_and_no_cuda_library(python: str):
    assert pins(f"plan-gpu-{python}").keys() == COMPILER | REQUIRED_BY_NVCC


@pytest.mark.parametrize("python", PYTHONS)
def test_planning_and_running_on_a_gpu_use_the_same_assembler(python: str):
    planning, running = pins(f"plan-gpu-{python}"), pins(f"gpu-{python}")
    assert planning.items() <= running.items()
    locked = {**planning, **pins(python)}
    for requirement in requirements("plan-gpu"):
        assert locked[requirement.name] in requirement.specifier


def test_the_assembler_and_libdevice_are_found_without_a_cuda_toolkit():
    """XLA looks in site-packages/nvidia/cu13; both wheels must put their files there."""
    if sys.platform != "linux":
        pytest.skip("there are wheels for Linux only")
    root = Path(str(distribution("nvidia-cuda-nvcc").locate_file("nvidia/cu13")))
    assert os.access(root / "bin" / "ptxas", os.X_OK)
    assert (root / "nvvm" / "libdevice" / "libdevice.10.bc").stat().st_size > 100_000


def test_oldest_supported_versions_are_tested():
    tested = pins("py311")
    floors = {r.name: r.specifier for r in requirements("flax")}
    for name in ("jax", "flax", "optax", "orbax-checkpoint"):
        assert str(floors[name]) == f">={tested[name]}"


def find_python(wanted: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYENV_ROOT": "/nowhere"}
    command = [ROOT / ".ci" / "find-python", wanted]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_an_interpreter_that_does_not_run_is_passed_over(tmp_path: Path):
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
    broken, working = tmp_path / "shims", tmp_path / "bin"
    for folder, script in ((broken, "exit 127"), (working, f'exec "{sys.executable}" "$@"')):
        folder.mkdir()
        (folder / f"python{wanted}").write_text(f"#!/bin/sh\n{script}\n")
        (folder / f"python{wanted}").chmod(0o755)
    found = find_python(wanted, broken, working)
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)


def test_a_missing_interpreter_is_named():
    missing = find_python("3.99")
    assert missing.returncode == 1
    assert missing.stdout == ""
    assert "No Python 3.99 with venv" in missing.stderr
