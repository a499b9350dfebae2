"""When each part of a cut step runs and each copy goes, on paper, as ``stream`` will do it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

# Python's share of a part: what it fetches is asked for, it is started, what it gives is sent. On
# the host of an H200 about 1 ms, of which a list of eight copies is 0.4 and a program 0.3.
_PYTHON_SECONDS = 1e-3
# Stages that may be in the device's queue at a time. With one, the device waits for Python between
# two stages, 1.0 ms on an H200; with more than two, copies would wait for more.
STAGES_QUEUED = 2
# How many stages ahead lent leaves are fetched, where there is room.
STAGES_AHEAD = 2


@dataclass(frozen=True)
class Turn:
    """A part of a step on a timeline.

    Attributes:
        seconds: of computation.
        fetched: bytes that are copied to the device for it, and ``sent`` those copied back.
        way: device memory of what is copied for it.
        room: device memory for what is copied while it runs, its own included.
        stage: whether it is a stage of what computes gradients.
        alone: seconds of it in which only what it copies by itself is under way.
    """

    seconds: float
    fetched: int = 0
    sent: int = 0
    way: int = 0
    room: int = 0
    stage: bool = False
    alone: float = 0.0


@dataclass(frozen=True)
class Times:
    """What a timeline came to.

    Attributes:
        seconds: of the step.
        exposed: in so many of them nothing is computed.
    """

    seconds: float
    exposed: float


def run_through(first: float, turns: Sequence[Turn], bytes_per_second: float, ahead: int) -> Times:
    """Go through a step.

    A copy to the device waits for what was in the device's queue when it was asked for, a part for
    what is fetched for it, and a copy back for its part. Both directions go at once.

    Args:
        first: seconds of the first part.
        turns: the others, in order.
        bytes_per_second: of the link in each direction while both are busy.
        ahead: bytes that may be fetched while the first part runs.

    >>> compute = [Turn(1.0, 10, way=10, room=20, stage=True) for _ in range(4)]
    >>> round(run_through(1.0, compute, 10.0, 20).seconds, 2)  # copies as long as computation
    5.0
    >>> tight = [Turn(1.0, 10, way=10, room=10, stage=True) for _ in range(4)]
    >>> round(run_through(1.0, tight, 10.0, 10).seconds, 2)  # no room for what is next
    8.0
    """
    return _Clock(turns, bytes_per_second).through(first, ahead)


class _Clock:
    """The same bookkeeping as ``stream`` does, with times."""

    def __init__(self, turns: Sequence[Turn], bytes_per_second: float):
        self.turns, self.speed = turns, bytes_per_second
        self.python = self.queue = 0.0  # Python's own time, and when the device's queue is empty.
        self.inwards = self.outwards = 0.0  # When each direction of the link is free.
        self.arrived: list[float] = []
        self.sends: deque[tuple[float, int, int]] = deque()
        self.leaving: deque[tuple[float, int]] = deque()
        self.under_way, self.stage = 0, 1

    def through(self, first: float, ahead: int) -> Times:
        self._fetch_ahead(0, ahead)
        self.queue = self.python = first
        ends: deque[float] = deque()
        for number, turn in enumerate(self.turns):
            if len(self.arrived) == number:
                while self.under_way + turn.way > turn.room and self._wait():
                    pass
                self._fetch()
            if turn.stage:
                self._fetch_for_stage(number)
                if len(ends) == STAGES_QUEUED:
                    self.python = max(self.python, ends.popleft())
            else:
                self._fetch_ahead(number, turn.room)
            start = max(self.queue, self.arrived[number], self.python)
            self.queue = start + turn.seconds
            if turn.stage:
                ends.append(self.queue)
                self.stage += 1
            self._send(number, turn)
            if turn.fetched or turn.sent:
                self.python += _PYTHON_SECONDS
        whole = max(self.queue, self.outwards)
        computed = first + sum(turn.seconds - turn.alone for turn in self.turns)
        return Times(whole, max(0.0, whole - computed))

    def _room(self, number: int) -> int:
        """What copies may take until the next turn that is to be fetched for has run."""
        return min(turn.room for turn in self.turns[number : len(self.arrived) + 1])

    def _fetch_for_stage(self, number: int) -> None:
        """Before a stage starts, fetch what is updated after it, and what the next ones read."""
        stages = STAGES_AHEAD
        while len(self.arrived) < len(self.turns) and stages:
            turn = self.turns[len(self.arrived)]
            stages -= turn.stage
            room = self._room(number)
            while self.under_way + turn.way > room:
                if not self.leaving and (not self.sends or self.sends[0][2] >= self.stage):
                    return
                self._wait()
            self._fetch()

    def _fetch_ahead(self, number: int, most: int) -> None:
        """Fetch for what comes after ``number`` as long as there is room."""
        while len(self.arrived) < len(self.turns):
            turn, room = self.turns[len(self.arrived)], min(most, self._room(number))
            while self.sends and self.sends[0][0] <= self.python:
                self._wait()
            # It is worth waiting for a copy back only if nothing is fetched for what comes next.
            near = len(self.arrived) - number < 2
            while self.under_way + turn.way > room:
                if (not self.leaving and not near) or not self._wait():
                    return
            self._fetch()

    def _fetch(self) -> None:
        turn = self.turns[len(self.arrived)]
        if turn.fetched:
            start = max(self.inwards, self.queue, self.python)
            self.inwards = start + turn.fetched / self.speed
        self.arrived.append(self.inwards if turn.fetched else 0.0)
        self.under_way += turn.way

    def _send(self, number: int, turn: Turn) -> None:
        if turn.sent:
            self.outwards = max(self.outwards, self.queue) + turn.sent / self.speed
            self.sends.append((self.outwards, turn.way, self.stage))
        else:
            self.leaving.append((self.arrived[number], turn.way))

    def _wait(self) -> bool:
        """Until memory of a copy is free; whether there was any to wait for."""
        if not self.leaving and not self.sends:
            return False
        ended, nbytes, *_ = (self.leaving or self.sends).popleft()
        self.python = max(self.python, ended)
        self.under_way -= nbytes
        return True
