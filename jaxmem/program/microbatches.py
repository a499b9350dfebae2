"""How many microbatches ``AUTO`` stands for while a step is traced, and which counts it may be."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax

from jaxmem.errors import AutoOutsideFitError, PlanMismatchError

# Every count tried costs a trace and a search; a count between two powers of two saves little
# more than the larger of them.
_MOST_COUNTS = 8


class Auto(enum.Enum):
    """``jaxmem.AUTO``: as many microbatches as the budget of the fitted step asks for."""

    AUTO = "auto"

    def __repr__(self) -> str:
        return "jaxmem.AUTO"


AUTO = Auto.AUTO


@dataclass(frozen=True, eq=False)
class Choice:
    """What ``AUTO`` stands for in one trace.

    Attributes:
        count: the number of microbatches.
        planned: whether a plan made before says so.
        sizes: the batch sizes that it split, in the order of their use.
    """

    count: int
    planned: bool = False
    sizes: list[int] = field(default_factory=list)


# Part of the key of JAX's trace cache, and another object in every trace: a jitted function inside
# of a step is traced anew, so that its uses of AUTO are seen and follow the count.
_choice = jax.make_user_context(None)


@contextlib.contextmanager
def standing_for(count: int, *, planned: bool = False) -> Iterator[Choice]:
    """Within, ``AUTO`` is ``count`` in this thread; the yielded choice tells where it was used."""
    choice = Choice(count, planned)
    with _choice(choice):
        yield choice


def chosen(size: int, name: str) -> int:
    """What ``AUTO`` stands for here, where ``name`` splits ``size`` rows.

    Raises:
        AutoOutsideFitError: no fitted step is being traced.
        PlanMismatchError: the count of the plan that is followed does not divide the batch.
    """
    choice: Choice | None = _choice.value
    if choice is None:
        raise AutoOutsideFitError(
            f"accumulate({name}, jaxmem.AUTO) was called outside of a fitted step, so there is no "
            "budget to choose a number of microbatches for. Call it inside a function under "
            "@jaxmem.fit(budget=...), or give a number: accumulate(..., 4)."
        )
    if choice.planned and size % choice.count:
        raise PlanMismatchError(
            f"the plan splits the batch of {name} into {choice.count} microbatches, and it has "
            f"{size} rows here. Plan again for this batch."
        )
    choice.sizes.append(size)
    return choice.count


def counts(sizes: Sequence[int]) -> tuple[int, ...]:
    """The numbers of microbatches that divide every batch, ascending; thinned where many.

    >>> counts([12]), counts([8, 12]), counts([7])
    ((1, 2, 3, 4, 6, 12), (1, 2, 4), (1, 7))
    >>> counts([720])
    (1, 2, 4, 8, 16, 36, 72, 144, 360, 720)
    """
    common = math.gcd(*sizes)
    divisors = [n for n in range(1, common + 1) if common % n == 0]
    if len(divisors) <= _MOST_COUNTS:
        return tuple(divisors)
    powers = [2**k for k in range(common.bit_length() + 1)]
    nearest = {next((d for d in divisors if d >= power), common) for power in powers}
    return tuple(sorted(nearest))


def nearest_divisors(size: int, count: int) -> tuple[int, ...]:
    """The divisors of ``size`` next to ``count``, below and above.

    >>> nearest_divisors(48, 5), nearest_divisors(7, 9)
    ((4, 6), (7,))
    """
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    below = [n for n in divisors if n <= count][-1:]
    return (*below, *[n for n in divisors if n > count][:1])
