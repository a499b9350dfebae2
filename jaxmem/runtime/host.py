"""How much host memory a plan may use, and which arguments are worth keeping there."""

from __future__ import annotations

import functools
import itertools
import numbers
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.sharding import NamedSharding

from jaxmem._before_jax import USABLE_SHARE
from jaxmem.errors import ArgumentError, BudgetError
from jaxmem.planner.decisions import AT_ONCE, IN_FLIGHT, InFlight
from jaxmem.planner.fill import Solution
from jaxmem.planner.offloading import hostable
from jaxmem.planner.retimed import retimed
from jaxmem.planner.withhost import WithHost
from jaxmem.runtime.compiler import Compiler
from jaxmem.targets.pinned import LIMIT_VARIABLE
from jaxmem.targets.target import Target
from jaxmem.units import budget_bytes, format_bytes

# Numbers of hosted leaves that are looked at, from the fewest that could be enough to all of them;
# and of those the ones that are compared for speed.
_MOST_SETS, _MOST_COMPARED = 16, 3
# So many of the smallest programs are compiled where nothing else fits; for one of them this share
# of what the smallest simple answer takes is searched, and one is the quickest that is this near.
MOST_SMALLEST, _BELOW, _NEAR = 4, 0.9, 1.05
_FREER = (IN_FLIGHT, (IN_FLIGHT[0], 0), (0, IN_FLIGHT[1]))


def host_memory(target: Target, wanted: int | None) -> int:
    """Bytes of host memory for each device; ``None`` stands for what the host has."""
    if wanted is not None:
        return wanted
    usable = min(int(target.host_bytes * USABLE_SHARE), target.pinned_host_bytes)
    return usable // max(1, target.devices_per_host)


def host_limit(target: Target) -> int:
    """The most host memory for each device that can be asked for: what the process may pin."""
    return min(target.host_bytes, target.pinned_host_bytes) // max(1, target.devices_per_host)


def check_host_budget(budget: Any) -> None:
    """Check that an amount of host memory can be understood, before it is known whose it is.

    Raises:
        BudgetError: it cannot.

    >>> check_host_budget("32GiB")
    """
    _host_bytes(budget, sys.maxsize)


def asked_host_budget(budget: Any, target: Target) -> int | None:
    """Host memory for each device; ``None`` leaves it for what fits in no other way.

    Raises:
        ArgumentError: the target computes in host memory.
        BudgetError: as :func:`parse_host_budget`.
    """
    if budget is None:
        return None
    if budget == 0:
        return 0
    if target.platform == "cpu":
        raise ArgumentError(
            f"host_budget={budget!r}, and {target.name} computes in host memory: there is nowhere "
            "to move anything. Leave host_budget out, or name a GPU."
        )
    return parse_host_budget(budget, target)


def parse_host_budget(budget: Any, target: Target) -> int:
    """Bytes of host memory for each device that a plan may use.

    Raises:
        BudgetError: the amount cannot be understood, or is more than a process may pin.
    """
    limit, whole = host_limit(target), target.host_bytes // max(1, target.devices_per_host)
    nbytes = _host_bytes(budget, limit)
    if nbytes > limit:
        where = "each device's share of the host"
        if limit < whole:
            where = f"each device's share of pinned host memory ({LIMIT_VARIABLE} raises it)"
        raise BudgetError(
            f"host_budget={budget!r} ({format_bytes(nbytes)}) is more than {where}: "
            f"{format_bytes(limit)} ({limit} bytes). Use host_budget={limit} at most."
        )
    return nbytes


def _host_bytes(budget: Any, whole: int) -> int:
    if budget is None or (_is_number(budget) and budget == 0):
        return 0
    try:
        return budget_bytes(budget, whole)
    except BudgetError as error:
        raise BudgetError(
            f'host_budget={budget!r} is no amount of host memory. Use "32GiB", a number of bytes, '
            '"50%" of what each device may use, 0 for none at all, or leave it out for host memory '
            "only where nothing fits without."
        ) from error


def _is_number(budget: Any) -> bool:
    return isinstance(budget, numbers.Real) and not isinstance(budget, bool)


class OnHost:
    """Finds programs of which values and argument leaves are in host memory.

    Args:
        compiler: of the step.
        host_bytes: host memory that plans may use; ``None`` stands for what the host has.

    Attributes:
        allowed: bytes that may be used; 0 where the step cannot use any.
    """

    def __init__(self, compiler: Compiler, host_bytes: int | None):
        self.compiler, self.program, self.search = compiler, compiler.program, compiler.search
        possible = self.search.can_offload
        self.allowed = host_memory(compiler.target, host_bytes) if possible else 0

    @functools.cached_property
    def leaves(self) -> list[int]:
        """The leaves that can wait there; over several devices those that are laid out over them.

        Of the others it is not known on whose hosts they would wait.
        """
        program = self.program
        return [
            n
            for n in hostable(program)
            if not program.sharded or isinstance(program.shardings[n], NamedSharding)
        ]

    def sets(self, budget_bytes: int) -> list[frozenset[int]]:
        """Growing sets of leaves to host, from the smallest that could be enough.

        Values alone come first where arguments and results fit on the device.
        """
        program, leaves = self.program, self.leaves
        first = len(program.consts)
        away = itertools.accumulate(program.input_bytes[first + n] for n in leaves)
        enough = [
            count
            for count, nbytes in enumerate(away, 1)
            if nbytes <= self.allowed and program.fixed_bytes - nbytes < budget_bytes
        ]
        step = max(1, -(-(len(enough) - 1) // (_MOST_SETS - 1)))
        chosen = dict.fromkeys([*enough[::step], *enough[-1:]])
        found = [frozenset(leaves[:count]) for count in chosen]
        return [frozenset[int](), *found] if program.fixed_bytes <= budget_bytes else found

    def updates_early(self, hosted: frozenset[int]) -> bool:
        """Whether updates of these leaves can run before all else is done, so in two orders."""
        return self.search.scheduler.updates_early(self.program.hosting(hosted))

    def solved(
        self,
        hosted: frozenset[int],
        room: Callable[[int], int],
        *,
        updates_last: bool = False,
        in_flight: InFlight = IN_FLIGHT,
    ) -> Solution | None:
        """The fastest program with these leaves in host memory; ``None`` if none fits.

        Args:
            hosted: the leaves.
            room: temporary bytes that there are with so many bytes away.
            updates_last: they are updated after all else, and not as soon as that can be.
            in_flight: so many of the largest copies there, and back, may be on the way at once.
        """
        away = self.program.host_bytes(self.program.hosting(hosted))
        with self.search.hosting(hosted, updates_last=updates_last, in_flight=in_flight):
            return self.search.solve(room(away), self.allowed - away)

    def fewest(
        self,
        sets: Sequence[frozenset[int]],
        room: Callable[[int], int],
        tried: Collection[frozenset],
        *,
        updates_last: bool,
        in_flight: InFlight = IN_FLIGHT,
    ) -> tuple[int, Solution] | None:
        """The first of growing ``sets`` with which something new fits on paper, by bisection."""
        low, high, found = 0, len(sets), None
        while low < high:
            middle = (low + high) // 2
            how = {"updates_last": updates_last, "in_flight": in_flight}
            solution = self.solved(sets[middle], room, **how)
            if solution is None or solution.key in tried:
                low = middle + 1
            else:
                high, found = middle, (middle, solution)
        return found

    def quickest(
        self, budget_bytes: int, room: Callable[[int], int], tried: Collection[frozenset]
    ) -> Solution | None:
        """The fastest new program with leaves in host memory, of a few numbers of leaves."""
        sets = [hosted for hosted in self.sets(budget_bytes) if hosted]
        step = max(1, -(-len(sets) // _MOST_COMPARED))
        solutions = []
        for hosted in sets[::-step]:
            found = self.solved(hosted, room)
            if found is None or found.key in tried:
                found = self.solved(hosted, room, updates_last=True)
            solutions.append(found)
        new = [s for s in solutions if s is not None and s.key not in tried]
        return min(new, key=lambda s: s.cost, default=None)

    def smallest(self) -> list[Solution]:
        """The smallest programs on paper with as much as possible in host memory.

        The same ones whatever was planned before. What is fetched changes which is the smallest:
        six products and their momentum take 92 MiB on paper as the smallest simple answer has it,
        which compiles to 112 (jax 0.10.2), and 84 where a search is given nine tenths of that.
        Updates as soon as gradients are there free those, and take room beside the backward pass:
        the smallest of either order is one of them. What is fetched before it is needed takes room,
        too, and XLA starts copies later than that: a GPT of 1.3e9 parameters over four H200 is
        6.21 GiB on paper and compiles to 5.82 with copies early enough to hide (jax 0.11.2), and
        both are 5.08 with each where it is needed, which takes 3% longer as played through. What is
        a few percent smaller on paper need not be so once lifetimes are packed: 4.92 GiB, with the
        way forward made again as a whole, compiles to 5.42. So the quickest near the smallest is
        another.

        Returns:
            The quickest first.
        """
        most = self.sets(2**63)[-1]
        if not self.search.choices:
            return []
        left = self.allowed - self.program.host_bytes(self.program.hosting(most))
        orders = (False, True) if self.updates_early(most) else (False,)
        found: list[Solution] = []
        with self.search.afresh():
            for updates_last in orders:
                how = {"updates_last": updates_last, "in_flight": AT_ONCE}
                with self.search.hosting(most, **how):
                    found += self._smallest(most, left)[: MOST_SMALLEST // len(orders)]
        return sorted(map(self._early, found), key=lambda s: s.cost)

    def _smallest(self, hosted: frozenset[int], host_bytes: int) -> list[Solution]:
        """The quickest near the smallest, the smallest and more, with so much room for values."""
        search = self.search
        found = [*(search.least() if hosted else [])]
        if found:
            below = search.solve(int(found[0].temp_bytes * _BELOW), host_bytes)
            found += [] if below is None else [below]
        # What loops carry may wait there, too.
        found += WithHost(search, 0, host_bytes).simple()
        ordered = sorted(found, key=lambda s: (s.temp_bytes, s.seconds))
        near = (s for s in ordered if s.temp_bytes <= _NEAR * ordered[0].temp_bytes)
        first = sorted(near, key=lambda s: s.cost)[:1]
        return list({s.key: s for s in (*first, *ordered)}.values())

    def _early(self, found: Solution) -> Solution:
        """It, with as many copies in flight as elsewhere, or one way, if that takes no more."""
        if found.in_flight != AT_ONCE:
            return found
        freer = [retimed(self.search, found, in_flight=most) for most in _FREER]
        same = [s for s in freer if s.temp_bytes <= found.temp_bytes and s.cost <= found.cost]
        return min(same, key=lambda s: s.cost, default=found)
