"""Kernels that one compile for an absent GPU leaves for the next."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxmem.targets import compile_for, compiling, kernels
from jaxmem.targets.target import Target

X = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def softmaxes(x):
    return jax.nn.softmax(jnp.tanh(x @ x)) @ x


def file_of(model: str) -> Path:
    return Path(kernels.kernels_of(model)["xla_gpu_kernel_cache_file"])


@pytest.fixture
def none_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "_folder", lambda process: tmp_path)


def test_a_program_that_was_compiled_makes_no_kernel_again(none_kept):
    jax.clear_caches()
    compile_for("h200", softmaxes, [X])
    first = file_of("h200").read_bytes()
    assert first
    jax.clear_caches()
    compile_for("h200", softmaxes, [X])
    assert len(file_of("h200").read_bytes()) == len(first)
    # Of another program only what it does not share is new.
    compile_for("h200", lambda x: jnp.cumsum(softmaxes(x), axis=-1), [X])
    assert len(file_of("h200").read_bytes()) > len(first)


def test_kept_kernels_change_no_bytes(none_kept, monkeypatch):
    kept = [compile_for("h200", jax.grad(lambda x: softmaxes(x).sum()), [X]) for _ in range(2)]
    monkeypatch.setattr(compiling, "kernels_of", lambda model: {})
    alone = compile_for("h200", jax.grad(lambda x: softmaxes(x).sum()), [X])
    assert kept[0].memory == kept[1].memory == alone.memory


def test_each_model_and_each_thread_has_its_own(none_kept):
    assert file_of("h200") == file_of("h200") != file_of("a100-40")
    found: list[Path] = []
    thread = threading.Thread(target=lambda: found.append(file_of("h200")))
    thread.start()
    thread.join()
    assert found[0] != file_of("h200")


def test_a_file_that_has_grown_too_large_is_begun_again(none_kept, monkeypatch):
    monkeypatch.setattr(kernels, "_MOST_BYTES", 10)
    file_of("h200").write_bytes(b"x" * 10)
    assert file_of("h200").exists()
    file_of("h200").write_bytes(b"x" * 11)
    assert not file_of("h200").exists()


def test_what_is_swept_away_meanwhile_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "_folder", lambda process: tmp_path / "swept")
    compile_for("h200", softmaxes, [X])
    file_of("h200").unlink()
    file_of("h200").parent.rmdir()
    jax.clear_caches()
    assert compile_for("h200", softmaxes, [X]).memory.total_bytes
    assert file_of("h200").exists()


def test_programs_for_this_machine_are_made_for_themselves():
    assert (
        kernels.kernels_of("h200").keys()
        <= compiling._options(Target("h200"), False, {}, False).keys()
    )
    assert (
        not kernels.kernels_of("h200").keys()
        & compiling._options(Target("h200"), True, {}, False).keys()
    )


def test_nothing_is_left_when_the_process_ends():
    code = (
        "import os; from jaxmem.targets import kernels; "
        "f = kernels._folder(os.getpid()); assert f.is_dir(); print(f)"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert not Path(ran.stdout.strip()).exists()


def test_programs_that_jax_keeps_on_disk_have_the_same_options_in_each_process(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert kernels.kernels_of("h200") == {}
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert kernels.kernels_of("h200")
