"""Notice that a job is told to stop (SIGTERM), at a step that all processes agree on."""

from __future__ import annotations

import signal
import threading
from typing import Any

from jax.experimental import multihost_utils

from jaxmem import _compat, processes
from jaxmem.errors import ArgumentError
from jaxmem.state import ondisk

_listener: _Listener | None = None
# The step of the first call: JAX's service counts from 0, and stops one after the largest it was
# told. A run that goes on at step 100 would never come to the 1 of a signal that came before.
_first: int | None = None


class _Listener:
    """Hears SIGTERM in a single process.

    Attributes:
        is_told: whether one came.
    """

    def __init__(self) -> None:
        self.is_told = False
        self._before: Any = signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, frame: Any) -> None:
        self.is_told = True
        # The next one does what it did before: who asks twice does not want to wait.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)


def preempted(step: int) -> bool:
    """Whether the job was told to stop, so that this is the step to save and to exit after.

    Call it after every step, on every process, with the number of the step. From the first call on
    SIGTERM, which SLURM, Kubernetes and cloud providers send before they take a machine, no longer
    ends the process; a second one does. Under ``jax.distributed``, from its start on, a signal to
    one process is enough, and all are told at the same step, one that none of them has reached yet;
    no further signal ends them, ``SIGKILL`` does.

    Args:
        step: its number; under ``jax.distributed`` it must grow by one from call to call, from the
            same first one on all processes.

    Raises:
        ArgumentError: ``step`` is no number, this is not the main thread, which Python wants for
            signals, or JAX's preemption service is switched off.

    The agreement of several processes is that of JAX's preemption service
    (``jax.experimental.multihost_utils.reached_preemption_sync_point``).

    >>> for step in range(3):
    ...     if preempted(step):
    ...         break  # jaxmem.save("checkpoints", state, step=step, wait=True)
    >>> step
    2
    """
    step = ondisk.number_of(step)
    if isinstance(step, bool) or not isinstance(step, int):
        raise ArgumentError(f"step={step!r}: give the number of the step.")
    if processes.several():
        return _told_together(step)
    global _listener
    if _listener is None:
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError(
                "jaxmem.preempted is called for the first time in "
                f"{threading.current_thread().name}, and Python takes signals in the main thread "
                "only. Call it there once before."
            )
        _listener = _Listener()
    return _listener.is_told


def _told_together(step: int) -> bool:
    global _first
    if not _compat.preemption_service_enabled():
        raise ArgumentError(
            "jaxmem.preempted needs JAX's preemption service, and jax_enable_preemption_service is "
            "False. Leave it on before jax.distributed.initialize()."
        )
    _first = step if _first is None else _first
    return bool(multihost_utils.reached_preemption_sync_point(step - _first + 1))
