"""Start scripts as the processes of ``jax.distributed`` on this machine, and leave none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from jaxmem import processes
from jaxmem.errors import JaxmemError

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    """One that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def said(do: Callable[[], object]) -> str:
    """In a script: the error that ``do`` raises, which must be the same on all processes."""
    try:
        do()
    except JaxmemError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("nothing was raised")
    texts = processes.meet("compare errors", 20).exchange("text", text)
    assert len({*texts}) == 1, texts
    return text


def initialize(shutdown_timeout_seconds: int = 20) -> int:
    """In a script: join the others; its first arguments are those of :func:`started`.

    Returns:
        The number of this process.
    """
    port, count, number = map(int, sys.argv[1:4])
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        count,
        number,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
    )
    return number


@contextlib.contextmanager
def started(
    script: Path, *args: str, count: int = 2, devices: int = 2
) -> Iterator[list[subprocess.Popen]]:
    """``count`` processes with ``devices`` CPU devices each, which are gone afterwards."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    port = str(free_port())
    processes: list[subprocess.Popen] = []
    try:
        for number in range(count):
            command = [sys.executable, str(script), port, str(count), str(number), *args]
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.communicate()


def run(script: Path, *args: str, count: int = 2, devices: int = 2, timeout: float = 120):
    """What each process wrote to stdout; all must end well."""
    with started(script, *args, count=count, devices=devices) as processes:
        # At the same time: one whose pipe is full waits, and the others for it.
        with ThreadPoolExecutor(count) as pool:
            ended = list(pool.map(lambda process: process.communicate(timeout=timeout), processes))
        for process, (out, err) in zip(processes, ended, strict=True):
            assert process.returncode == 0, f"{out}\n{err}"
        return [out for out, _ in ended]
