"""Several processes agree on what they do, and say which of them is missing.

Everything goes through the key-value store of ``jax.distributed``. No device takes part, so nothing
here waits for a collective that another process does not run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxmem import _compat, errors
from jaxmem.errors import BudgetInfeasibleError, Holder, JaxmemError, ProcessError

# Less than the 100 s after which jax.distributed ends all processes because of a dead one.
TIMEOUT_SECONDS = 90.0
# A wait in pieces lets Python see signals in between.
_PIECE_SECONDS = 0.5
_lock = threading.RLock()
_turn = 0
_past: list[Meeting] = []


def several() -> bool:
    """Whether this is one of several processes of ``jax.distributed``."""
    return jax.process_count() > 1


def number() -> int:
    """The number of this process."""
    return jax.process_index()


def put(array: Any, sharding: Any) -> jax.Array:
    """An array moved to a sharding; over several processes each gives its parts of the whole.

    ``jax.device_put`` would have all processes compare what they have, on their devices.
    """
    here = not isinstance(array, jax.Array) or array.is_fully_addressable
    if not here and not sharding.is_fully_addressable and _is_other_memory(array, sharding):
        return put_parts([array], [sharding])[0]
    if sharding.is_fully_addressable or not here:
        return jax.device_put(array, sharding)
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(array), sharding)  # Its last dimension stays whole.
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def put_parts(arrays: Sequence[jax.Array], shardings: Sequence[Any]) -> list[jax.Array]:
    """Arrays in other memory of the devices that they are on, each copied by who has it.

    For arrays over several processes ``jax.device_put`` runs a program, which all must run in the
    same order as everything else.

    Args:
        arrays: on devices.
        shardings: those of the arrays but for the kind of memory.
    """
    if all(array.is_fully_addressable for array in arrays):
        return jax.device_put([*arrays], [*shardings])
    parts = [
        (s.data, s.device, to.memory_kind)
        for a, to in zip(arrays, shardings, strict=True)
        for s in a.addressable_shards
    ]
    places = [SingleDeviceSharding(device, memory_kind=kind) for _, device, kind in parts]
    copied = iter(jax.device_put([data for data, _, _ in parts], places))
    return [
        jax.make_array_from_single_device_arrays(
            array.shape, sharding, [next(copied) for _ in array.addressable_shards]
        )
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def _is_other_memory(array: jax.Array, sharding: Any) -> bool:
    kind = sharding.memory_kind
    return array.sharding.with_memory_kind(kind).is_equivalent_to(sharding, array.ndim)


def check_timeout(timeout: Any) -> None:
    """Check seconds to wait for other processes.

    Raises:
        ArgumentError: it is no positive number.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise errors.ArgumentError(
            f"timeout={timeout!r}: give the seconds that processes wait for each other."
        )


def joined(numbers: Sequence[int]) -> str:
    """Numbers of processes as text.

    >>> joined([1]), joined([0, 3])
    ('process 1', 'processes 0, 3')
    """
    return f"process{'' if len(numbers) == 1 else 'es'} {', '.join(map(str, numbers))}"


def meet(doing: str, timeout: float = TIMEOUT_SECONDS) -> Meeting:
    """A meeting of all processes, each of which is to do the same.

    The first call on one process meets the first call on each other, and so on.

    Args:
        doing: what, for people and with what it depends on: ``"save checkpoint 3 in /runs"``.
        timeout: seconds that each round waits for processes that say nothing.

    Raises:
        ProcessError: some do not come, or are to do something else.
    """
    global _turn
    with _lock:
        meeting = Meeting(str(_turn), doing, timeout)
        _turn += 1
        said = meeting.exchange("doing", doing)
        for past in _past:  # Whoever is here has left those.
            past.clear()
        _past.clear()
        others = tuple(n for n, its in enumerate(said) if its != said[0])
        if others:
            raise ProcessError(
                f"processes do different things: process 0 is to {said[0]}, and process "
                f"{others[0]} to {said[others[0]]}. All must do the same in the same order.",
                processes=others,
            )
        return meeting


@dataclass(eq=False)
class Meeting:
    """Rounds in which every process says something and hears what the others say.

    Attributes:
        name: what no other meeting has.
        doing: what it is for.
        timeout: seconds that each round waits for processes that say nothing.
    """

    name: str
    doing: str
    timeout: float
    _told: list[str] = field(default_factory=list)

    def tell(self, phase: str, mine: Any) -> None:
        """Say something, as JSON."""
        key, text = self._key(phase, number()), json.dumps(mine)
        _answer(lambda: _client().key_value_set(key, text, allow_overwrite=True), self.timeout)
        self._told.append(key)

    def exchange(self, phase: str, mine: Any) -> list[Any]:
        """What each process says in a round, in the order of their numbers.

        Raises:
            ProcessError: some say nothing.
        """
        self.tell(phase, mine)
        try:
            return self.hear(phase, range(jax.process_count()))
        except ProcessError:
            self.clear()  # Who comes late finds nobody here, rather than half of a meeting.
            raise

    def hear(self, phase: str, numbers: Sequence[int], patient: bool = False) -> list[Any]:
        """What some processes say in a round, which others need not hear.

        Args:
            phase: the round.
            numbers: of those processes.
            patient: wait for as long as the coordinator answers.

        Raises:
            ProcessError: some of them say nothing.
        """
        end = math.inf if patient else time.monotonic() + self.timeout
        found = {n: _get(self._key(phase, n), end, self.timeout) for n in numbers}
        missing = tuple(n for n, text in found.items() if text is None)
        if number() in missing:  # It was said, so what was not heard is the coordinator.
            raise _silent(self.timeout)
        if missing:
            raise ProcessError(
                f"{joined(missing)} of {jax.process_count()} did not come within "
                f"{self.timeout:g} s to {self.doing}: dead, stopped, or busy with something else. "
                "All processes must do the same in the same order.",
                processes=missing,
            )
        return [json.loads(text) for text in found.values() if text is not None]

    def together(self, phase: str, do: Callable[[], Any]) -> list[Any]:
        """What ``do`` returns on each process; where it fails on some, all raise that error.

        Raises:
            ProcessError: some processes say nothing, or ``do`` failed on some of them.
            JaxmemError: what ``do`` raised, here or on another process.
        """
        mine, error = None, None
        try:
            mine = do()
        except Exception as found:
            error = found
        all_said = self.exchange(phase, self.report(mine, error))
        failed = [n for n, (_, its) in enumerate(all_said) if its is not None]
        if failed:
            if error is not None:
                raise error
            raise _from_json(all_said[failed[0]][1], failed[0])
        return [its for its, _ in all_said]

    def by_first(self, phase: str, do: Callable[[], Any], patient: bool = False) -> Any:
        """What ``do`` returns on process 0, the only one that calls it; all raise its errors.

        With ``patient`` the others give it as long as it takes: the coordinator runs in process 0,
        so it is known to be there.
        """
        if number():
            its, error = self.hear(phase, [0], patient)[0]
            if error is not None:
                raise _from_json(error, 0)
            return its
        try:
            mine = do()
        except BaseException as error:  # Ctrl-C, too: the others must not wait for it.
            self.tell(phase, self.report(None, error))
            raise
        self.tell(phase, self.report(mine))
        return mine

    def check_same(self, phase: str, lines: Sequence[str], what: str, hint: str) -> None:
        """Check that all processes have the same lines, of ``what``; ``hint`` says what to do.

        Raises:
            ProcessError: they differ; it shows the first line that does, and who has another.
        """
        digests = [_digest(line) for line in lines]
        if len({*self.exchange(phase, _digest("".join(digests)))}) == 1:
            return
        theirs = self.exchange(f"{phase} each", [digest[:12] for digest in digests])
        first = theirs[0]
        longest = max(map(len, theirs))
        at = next(
            n for n in range(longest) if any(t[n : n + 1] != first[n : n + 1] for t in theirs)
        )
        texts = self.exchange(f"{phase} text", lines[at] if at < len(lines) else "nothing more")
        others = tuple(n for n, text in enumerate(texts) if text != texts[0])
        raise ProcessError(
            f"{what} of {joined(others)} {'is' if len(others) == 1 else 'are'} not that of process "
            f"0, to {self.doing}: process 0 has {texts[0]}, process {others[0]} has "
            f"{texts[others[0]]}. {hint}",
            processes=others,
        )

    def left(self) -> None:
        """This process has heard all that it needs; at the next meeting what it said is deleted."""
        with _lock:
            _past.append(self)

    def clear(self) -> None:
        """Take back what this process said."""
        for key in self._told:
            # Else there is nobody to tell.
            with contextlib.suppress(jax.errors.JaxRuntimeError, ProcessError):
                _answer(lambda key=key: _client().key_value_delete(key), _PIECE_SECONDS)
        self._told.clear()

    def report(self, mine: Any, error: BaseException | None = None) -> Any:
        """What :meth:`together` says of this process: what it has done, or why it could not."""
        if error is None:
            return [mine, None]
        if not isinstance(error, JaxmemError):
            text = f"process {number()} failed to {self.doing}: {type(error).__name__}: {error}"
            error = ProcessError(text, processes=(number(),))
        more: dict[str, Any] = {
            name: value
            for name, value in vars(error).items()
            if isinstance(value, int | str | tuple)
        }
        if isinstance(error, BudgetInfeasibleError):
            more["holders"] = [asdict(holder) for holder in error.holders]
        return [None, [type(error).__name__, str(error), more]]

    def _key(self, phase: str, n: int) -> str:
        return f"jaxmem/{self.name}/{phase}/{n}"


def _client() -> Any:
    client = _compat.distributed_client()
    if client is None:
        raise ProcessError(
            f"this is one of {jax.process_count()} processes, and they have no coordinator: start "
            "them with jax.distributed.initialize().",
            processes=(),
        )
    return client


def _get(key: str, end: float, timeout: float) -> str | None:
    """What is said under a key; ``None`` where it is not before ``end``.

    Raises:
        ProcessError: the coordinator does not answer, for ``timeout`` seconds or for good.
    """
    while True:
        left = end - time.monotonic()
        piece = max(1, round(1000 * min(left, _PIECE_SECONDS)))
        try:
            # A coordinator that is there says within a piece that nothing is.
            return _answer(
                lambda piece=piece: _client().blocking_key_value_get(key, piece),
                min(max(left, 0), timeout) + 2 * _PIECE_SECONDS,
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise ProcessError(
                    f"the coordinator, which runs in process 0, does not answer: {error}",
                    processes=(0,),
                ) from error
        if left <= 0:
            return None


def _answer(ask: Callable[[], Any], timeout: float) -> Any:
    """What the coordinator answers; calls of JAX wait forever for one that is stopped."""
    answers: list[tuple[Any, Exception | None]] = []

    def asking() -> None:
        try:
            answers.append((ask(), None))
        except Exception as error:  # Raised by who asked, below.
            answers.append((None, error))

    thread = threading.Thread(target=asking, daemon=True, name="jaxmem_asks")
    thread.start()
    end = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < end:
        thread.join(_PIECE_SECONDS)
    if not answers:
        raise _silent(timeout)
    result, error = answers[0]
    if error is not None:
        raise error
    return result


def _silent(timeout: float) -> ProcessError:
    return ProcessError(
        f"the coordinator, which runs in process 0, did not answer within {timeout:g} s: it "
        "is stopped, or this machine does not reach it.",
        processes=(0,),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _from_json(said: Any, process: int) -> JaxmemError:
    name, text, more = said
    kind = getattr(errors, name)
    error = kind.__new__(kind)
    error.args = (text,)
    for key, value in more.items():
        made = tuple(Holder(**holder) for holder in value) if key == "holders" else value
        setattr(error, key, tuple(made) if isinstance(made, list) else made)
    error.add_note(f"It is process {process} that says so.")
    return error
