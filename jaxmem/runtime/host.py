"""How much host memory a plan may use, and which arguments are worth keeping there."""

from __future__ import annotations

from collections.abc import Iterator

from jaxmem.planner.offloading import hostable
from jaxmem.program.ir import Program
from jaxmem.targets.target import Target

# Of a host's memory; data loading, the program itself and other processes need the rest.
_USABLE_SHARE = 0.8
# Numbers of hosted leaves that are looked at, from the fewest that could be enough to all of them.
_MOST_PREFIXES = 16


def host_memory(target: Target, wanted: int | None) -> int:
    """Bytes of host memory for each device; ``None`` stands for what the host has."""
    if wanted is not None:
        return wanted
    usable = min(int(target.host_bytes * _USABLE_SHARE), target.pinned_host_bytes)
    return usable // max(1, target.devices_per_host)


def host_limit(target: Target) -> int:
    """The most host memory for each device that can be asked for: what the process may pin."""
    return min(target.host_bytes, target.pinned_host_bytes) // max(1, target.devices_per_host)


def prefixes(program: Program, budget_bytes: int, allowed: int) -> Iterator[frozenset[int]]:
    """Sets of argument leaves to host, the smallest that could be enough first.

    Values alone come first where arguments and results fit on the device.
    """
    if program.fixed_bytes <= budget_bytes:
        yield frozenset()
    leaves, first = hostable(program), len(program.consts)
    bytes_of = [program.block.inputs[first + n].nbytes for n in leaves]
    enough = []
    for count in range(1, len(leaves) + 1):
        away = sum(bytes_of[:count])
        if away <= allowed and program.fixed_bytes - away < budget_bytes:
            enough.append(count)
    step = max(1, -(-(len(enough) - 1) // (_MOST_PREFIXES - 1)))
    chosen = dict.fromkeys([*enough[::step], *enough[-1:]])
    for count in chosen:
        yield frozenset(leaves[:count])
