"""The table of GPUs: what data sheets, the CUDA guide and XLA's own specifications say."""

from __future__ import annotations

import difflib
import functools
import json
import re
from importlib import resources
from typing import Any, NamedTuple

from jaxmem.errors import UnknownTargetError

_COUNTED = re.compile(
    r"(?:(?P<hosts>\d+)\s*x\s*)?(?P<devices>\d+)\s*x\s*(?P<model>\D.*)", re.IGNORECASE | re.DOTALL
)


class Request(NamedTuple):
    """A target name taken apart: ``4x8xh100`` is 4 hosts of 8 ``h100`` each."""

    model: str
    hosts: int
    devices_per_host: int


@functools.cache
def load() -> dict[str, Any]:
    """The whole of ``gpus.json``."""
    return json.loads(resources.files("jaxmem.targets").joinpath("gpus.json").read_text())


def models() -> tuple[str, ...]:
    """Names of every GPU in the table, as ``Target`` takes them."""
    return tuple(load()["gpus"])


def gpu(model: str) -> dict[str, Any]:
    """The table's entry of one GPU by its canonical name."""
    return load()["gpus"][model]


def link_bytes_per_second(model: str) -> int:
    """Bytes a second between host and device, in one direction."""
    return load()["host_links"][gpu(model)["host_link"]]["bytes_per_second"]


def sm_limits(compute_capability: str) -> dict[str, Any]:
    """Limits of one streaming multiprocessor of a compute capability such as ``9.0``."""
    return load()["compute_capabilities"]["limits"][compute_capability]


def parse(name: str) -> Request:
    """Take a target name apart.

    Raises:
        UnknownTargetError: no GPU of that name, or a count of zero.
    """
    match = _COUNTED.fullmatch(name.strip())
    hosts, devices, wanted = (
        (int(match["hosts"] or 1), int(match["devices"]), match["model"]) if match else (1, 1, name)
    )
    if hosts < 1 or devices < 1:
        raise UnknownTargetError(
            f"target {name!r} asks for no device. Use a count of at least one, "
            f'such as "8x{wanted.strip()}" or "4x8x{wanted.strip()}" (hosts x GPUs).'
        )
    model = _by_spelling().get(_spelling(wanted))
    if model is None:
        raise UnknownTargetError(_unknown(name, wanted))
    return Request(model, hosts, devices)


def by_device_kind(device_kind: str) -> str | None:
    """Name of the GPU that JAX calls ``device_kind``, or ``None`` if the table has no such GPU."""
    wanted = device_kind.lower()
    for model, entry in load()["gpus"].items():
        if wanted in (kind.lower() for kind in entry["device_kinds"]):
            return model
    return None


@functools.cache
def _by_spelling() -> dict[str, str]:
    spellings: dict[str, str] = {}
    for model, entry in load()["gpus"].items():
        for name in (model, *entry["aliases"], *entry["device_kinds"]):
            spellings.setdefault(_spelling(name), model)
    return spellings


def _spelling(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def _unknown(name: str, wanted: str) -> str:
    spellings = _by_spelling()
    near = difflib.get_close_matches(_spelling(wanted), spellings, n=6, cutoff=0.5)
    nearest = ", ".join(dict.fromkeys(spellings[spelling] for spelling in near))
    return (
        f"no target is called {name!r}."
        + (f" Nearest: {nearest}." if nearest else "")
        + f' Known: cpu, {", ".join(models())}; "8x{models()[0]}" is 8 of them, '
        f'"4x8x{models()[0]}" is 4 hosts with 8 each. Target.local() is this machine.'
    )
