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


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """One that nobody else gets until it is left; the coordinator, too, binds it to be shared."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(("127.0.0.1", 0))
        yield found.getsockname()[1]


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
        "PYTHONFAULTHANDLER": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    processes: list[subprocess.Popen] = []
    with held_port() as port:
        try:
            for number in range(count):
                numbers = map(str, (port, count, number))
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(script), *numbers, *args],
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


def ended(process: subprocess.Popen, timeout: float) -> tuple[str, str]:
    """What a process wrote to stdout and stderr, when it has ended.

    Raises:
        AssertionError: it has not after ``timeout`` seconds; with what its threads do.
    """
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        out, err = process.communicate()
        raise AssertionError(f"did not end in {timeout:g} s\n{out}\n{err}") from None


def run(script: Path, *args: str, count: int = 2, devices: int = 2, timeout: float = 120):
    """What each process wrote to stdout; all must end well."""
    with started(script, *args, count=count, devices=devices) as processes:
        # At the same time: one whose pipe is full waits, and the others for it.
        with ThreadPoolExecutor(count) as pool:
            said_by_each = list(pool.map(lambda process: ended(process, timeout), processes))
        for process, (out, err) in zip(processes, said_by_each, strict=True):
            assert process.returncode == 0, f"{out}\n{err}"
        return [out for out, _ in said_by_each]
