"""Kernels of programs for GPUs that are not there, kept for the next program.

Planning compiles a step several times, and most kernels of one schedule are those of the next. XLA
can read kernels from a file and add new ones to it: a GPT of 4 blocks that took 3.6 s of CPU time
to compile for an H200, 2.5 of them to make kernels, takes 1.0 s once its kernels are there. Bytes
and schedules are settled before, and stay the same.

A program for this machine does not read them: what runs is made for itself.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import threading
from pathlib import Path

import jax

# XLA reads all of a file for each program, and the kernels of one net of a few thousand operations
# are 1 MB: a larger file is of other programs.
_MOST_BYTES = 64 * 2**20


def kernels_of(model: str) -> dict[str, str]:
    """Compiler options that keep the kernels of a GPU of the table until the process ends.

    XLA does not lock the file, so that two programs at once must not share one: each thread has its
    own. Nor does it know of which GPU a kernel is: each model has its own, too.

    None with JAX's own cache on disk: its keys have all options in them, and a file's name would
    make each of them one that no other process asks for.

    >>> list(kernels_of("h200"))
    ['xla_gpu_kernel_cache_file']
    """
    if jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return {}
    folder = _folder(os.getpid())
    folder.mkdir(exist_ok=True)  # Old files are swept out of such places while a process runs.
    path = folder / f"{model}-{threading.get_ident()}"
    if path.exists() and path.stat().st_size > _MOST_BYTES:
        path.unlink()
    return {"xla_gpu_kernel_cache_file": str(path)}


@functools.cache
def _folder(process: int) -> Path:
    """A folder that goes when the process ends; a forked process has its own."""
    path = Path(tempfile.mkdtemp(prefix=f"jaxmem-kernels-{process}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
