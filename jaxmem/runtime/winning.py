"""Whether a step that streams can still be the quickest: asked on paper, before it is compiled.

Compiling the updates and the stages of a GPT takes as long as planning its gradients, and all of
that is in vain where another way is known to be quicker.
"""

from __future__ import annotations

import math

from jaxmem.program.cut import Cut
from jaxmem.program.ir import Block
from jaxmem.runtime.asked import Asked, NotQuickerError
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.staging import least_seconds

# XLA may make less of a schedule than was simulated, and then searches go on with more room. Of
# what is found in so much more, it must be this much slower to be given up before any compile.
_MORE_ROOM, _SURELY = 1.25, 0.01


def check_before(
    pieces: Cut, asked: Asked, compiler: Compiler, room_bytes: int, budget_bytes: int, **how: bool
) -> None:
    """Check that a step may be quick enough, before anything of it is compiled.

    Args:
        pieces: the step.
        asked: says how quick it must be.
        compiler: of its first part.
        room_bytes: bytes that the first part may take.
        budget_bytes: bytes on each device.
        how: as for :func:`jaxmem.runtime.staging.least_seconds`.

    Raises:
        NotQuickerError: with more room than there is it would be too slow.
    """
    if math.isinf(asked.quicker_than):
        return
    search, program = compiler.search, compiler.program
    room = int(_MORE_ROOM * (room_bytes - program.fixed_bytes))
    if search.keep_all.temp_bytes <= room:
        block, found = program.block, True
    else:
        solution = search.solve(room)
        block, found = compiler.block(solution), solution is not None
    # With no time left, or where splitting is not known, paper says too little.
    if found and not compiler.deadline.ran_out and program.is_counted:
        _check(pieces, asked, compiler, block, budget_bytes, _SURELY, **how)


def check_after(
    pieces: Cut, asked: Asked, compiler: Compiler, block: Block, budget_bytes: int, **how: bool
) -> None:
    """Check that a step may be quick enough, with the schedule of its first part.

    Raises:
        NotQuickerError: it is too slow however much room copies have.
    """
    if not math.isinf(asked.quicker_than):
        _check(pieces, asked, compiler, block, budget_bytes, 0.0, **how)


def _check(
    pieces: Cut,
    asked: Asked,
    compiler: Compiler,
    block: Block,
    budget_bytes: int,
    slower: float,
    **how: bool,
) -> None:
    seconds = least_seconds(pieces, block, compiler.target, budget_bytes, **how)
    if seconds >= asked.quicker_than * (1 + slower):
        raise NotQuickerError(seconds)
