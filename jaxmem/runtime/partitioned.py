"""Read from a compiled program what devices exchange, where values can be split in several ways.

Layouts that differ need other collectives: with activations split by the batch, weights are
gathered; with weights split by their columns, activations are exchanged in every layer. Bytes of
arrays hardly differ, for half of an array is half in whatever direction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

_SIZED = re.compile(r"\b(?:pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<dims>[\d,]*)\]")
_COLLECTIVE = re.compile(
    r" = (?P<type>[^%\"\n]*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"collective-permute)(?P<half>-start)?\("
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_CALLED = re.compile(
    r"\b(?:body|calls|to_apply|true_computation|false_computation)=%?(?P<name>[\w.-]+)|"
    r"\bbranch_computations=\{(?P<names>[^}]*)\}"
)
# Who takes part, in the ways in which the compiler writes that down: {{0,1},{2,3}}, [2,4]<=[8] and
# mesh['data'=2,'model'=4] {'model'}; 'model':(2)2 is a part of an axis.
_GROUPS = re.compile(
    r"\breplica_groups=(?:\{\{(?P<first>[\d,]+)\}|\[\d+,(?P<size>\d+)\]<=|"
    r"mesh\[(?P<mesh>[^\]]*)\][^{]*\{(?P<axes>[^}]*)\})"
)
_AXIS = re.compile(r"'(?P<name>[^']+)'(?::\(\d+\)(?P<part>\d+))?(?:=(?P<size>\d+))?")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(?P<count>\d+)"')


def exchanged_bytes(text: str, devices: int) -> float:
    """What each of ``devices`` sends in all collectives of a compiled program, in all turns of its
    loops.

    Where the program does not say who takes part in a collective, all do.

    >>> exchanged_bytes("%b = bf16[16]{0} all-gather(%a), dimensions={0}", 2)
    16.0
    """
    # What each computation sends by itself; what runs it, and how often at each time.
    own: dict[str, float] = {}
    turned: dict[str, tuple[str, int]] = {}
    inside = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            inside = head["name"]
            continue
        if found := _COLLECTIVE.search(line):
            own[inside] = own.get(inside, 0.0) + _sent(found, _taking_part(line) or devices)
        turns = _TURNS.search(line) if " while(" in line else None
        for called in _CALLED.finditer(line):
            names = [called["name"]] if called["name"] else called["names"].split(",")
            for name in names:
                turned[name.strip(" %")] = inside, int(turns["count"]) if turns else 1
    return sum(nbytes * _turns(name, turned) for name, nbytes in own.items())


def _taking_part(line: str) -> int | None:
    """How many devices take part in each group of a collective; ``None`` where that is all.

    >>> _taking_part("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}, dim")
    4
    """
    groups = _GROUPS.search(line)
    if groups is None:
        return None
    if groups["axes"] is None:
        return int(groups["size"] or 0) or len(groups["first"].split(","))
    sizes = {axis["name"]: axis["size"] for axis in _AXIS.finditer(groups["mesh"])}
    axes = _AXIS.finditer(groups["axes"])
    return math.prod(int(axis["part"] or sizes[axis["name"]]) for axis in axes)


def _turns(name: str, turned: Mapping[str, tuple[str, int]]) -> int:
    """How often a computation runs in all."""
    turns = 1
    while name in turned:
        name, count = turned[name]
        turns *= count
    return turns


def _sent(found: re.Match[str], devices: int) -> float:
    kind, sizes = found["kind"], list(_sizes(found["type"]))
    share = (devices - 1) / devices
    if kind == "all-reduce":
        return 2 * share * sum(sizes)
    if kind == "collective-permute":
        return float(sizes[0])
    if found["half"]:
        # The first half has its operands among its results.
        given, made = sum(sizes[: len(sizes) // 2]), sum(sizes[len(sizes) // 2 :])
        return share * made if kind == "all-to-all" else float(abs(made - given))
    return (devices - 1) * sum(sizes) if kind == "reduce-scatter" else share * sum(sizes)


def _sizes(types: str) -> Iterator[int]:
    for shape in _SIZED.finditer(types):
        bits = int(shape["bits"] or 8)
        yield math.prod(int(n) for n in shape["dims"].split(",") if n) * bits // 8
