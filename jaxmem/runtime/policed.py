"""Policies in the rounds: offloads without effect, and budgets that a policy does not fit."""

from __future__ import annotations

from typing import Any

from jaxmem.errors import ArgumentError, BudgetInfeasibleError, PolicyError, VerificationError
from jaxmem.planner.ruled import Ruled, unread
from jaxmem.policies import Policy
from jaxmem.program.ir import Block
from jaxmem.runtime.compiler import Compiler
from jaxmem.units import format_budget, format_bytes

# Why a program that fits as it is written was not taken.
NOT_AS_WRITTEN = "the policy recomputes or offloads"
_MANY = 3


def check_type(policy: Any) -> None:
    """Check that something is a policy of jaxmem.

    Raises:
        ArgumentError: it is not.
    """
    if policy is None or isinstance(policy, Policy):
        return
    name = getattr(policy, "__name__", None) or type(policy).__name__
    raise ArgumentError(
        f"policy is {name}: it takes a policy of jaxmem.policies, which tells names, modules and "
        "sizes apart and can be saved in the plan. JAX's own are there as policies.everything, "
        "nothing, dots and dots_with_no_batch_dims; for checkpoint names use policies.save(...)."
    )


def check_offloads(compiler: Compiler, host_bytes: int | None) -> None:
    """Check that every rule that offloads moves something to host memory, and may do so.

    Raises:
        PolicyError: one does not, or the host has been given less room.
    """
    search = compiler.search
    if not search.ruled.offloads:
        return
    smallest = search.smallest() if search.choices else None
    written = search.schedule(smallest) if smallest else compiler.program.block
    idle = unread(search.ruled, written)
    if idle is None:
        _check_room(compiler, smallest.host_bytes if smallest else 0, host_bytes)
        return
    what = compiler.program.name
    if not idle.labels:
        raise PolicyError(
            f"{idle.rule!r} offloads nothing in {what}: no value that lives from forward to "
            "backward is selected by it that no other rule saves."
        )
    more = f" and {len(idle.labels) - _MANY} more" if len(idle.labels) > _MANY else ""
    raise PolicyError(
        f"the offload of {', '.join(idle.labels[:_MANY])}{more} by {idle.rule!r} has no effect in "
        f"{what}: no backward pass reads it, or it is an argument and stays on the device. Name a "
        "value that the backward pass needs, such as a block's input, not its output."
    )


def _check_room(compiler: Compiler, needed: int, host_bytes: int | None) -> None:
    if host_bytes is None or needed <= host_bytes:
        return
    rules = " and ".join(repr(offloaded.rule) for offloaded in compiler.search.ruled.offloads)
    raise PolicyError(
        f"{rules} keeps {format_bytes(needed)} of {compiler.program.name} in host memory, and "
        f"host_budget allows {format_bytes(host_bytes)}. Use host_budget={format_budget(needed)!r} "
        "or leave it out, or save instead of offloading."
    )


def notes(ruled: Ruled, written: Block) -> list[str]:
    """What a plan says about rules that change nothing in the program it stands for."""
    found = [
        f"{rule!r} changes nothing: no backward pass needs what it saves" for rule in ruled.idle
    ]
    idle = unread(ruled, written)
    if idle is not None:
        found.append(
            f"{idle.rule!r} moves nothing in this plan: what reads those values is not made again "
            "in it, so that they are not needed behind the turn"
        )
    return found


def undone(compiler: Compiler, problem: str) -> VerificationError:
    """The error of a policy that the compiler did not follow."""
    return VerificationError(
        f"{compiler.program.name} does not follow {compiler.policy!r} on {compiler.target.name}: "
        f"{problem}. Save these values, or leave them to the planner with "
        "policies.planned.override(...)."
    )


def infeasible(
    compiler: Compiler, found: BudgetInfeasibleError, reason: str
) -> BudgetInfeasibleError:
    """The error of a budget that a policy does not fit.

    Args:
        compiler: follows the policy.
        found: what was found within the policy.
        reason: what is known beforehand, or ``""``.
    """
    policy, smallest = compiler.policy, found.smallest_bytes
    assert policy is not None
    held = ", ".join(
        f"{h.name} ({format_bytes(h.nbytes)}, {h.kind})" for h in found.holders[:_MANY]
    )
    own = min(nbytes for nbytes, _ in compiler.without_policy().least().kept)
    without = "its rules" if policy.uses_planner else "a policy"
    way = f"leave more to the planner, which reaches {format_bytes(own)} without {without}"
    if own >= smallest:
        way = f"a smaller batch or state: without {without} the planner needs as much"
    elif not policy.uses_planner:
        way += ": policies.planned.override(...) keeps only the rules that you need"
    why = f" ({reason})" if reason else ""
    return BudgetInfeasibleError(
        f"no plan fits budget={format_bytes(found.budget_bytes)} on {compiler.target.name} with "
        f"{policy!r}{why}: what it says needs {format_bytes(smallest)} for "
        f"{compiler.program.name}.\n"
        f"  Held there by: {held}.\n"
        f'  Use budget="{format_budget(smallest)}", or {way}.',
        budget_bytes=found.budget_bytes,
        smallest_bytes=smallest,
        holders=found.holders,
    )
