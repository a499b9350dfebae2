"""Target: what the hardware can do, by name or as found on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from jaxmem import units
from jaxmem.displayed import Displayed
from jaxmem.errors import ArgumentError
from jaxmem.targets import table
from jaxmem.targets.pinned import DEFAULT_BYTES, LIMIT_VARIABLE

# What XLA_PYTHON_CLIENT_MEM_FRACTION=.95 gives: the CUDA context, cuBLAS, cuDNN and NCCL live in
# the rest. JAX preallocates 75% unless told otherwise; Target.local() sees what it really has.
USABLE_SHARE = 0.95


class Flops(Mapping[str, float]):
    """FLOP/s by dtype name; a mapping that can be hashed and compared."""

    __slots__ = ("_items",)

    def __init__(self, rates: Mapping[str, float]):
        self._items = tuple(sorted((name, float(rate)) for name, rate in rates.items()))

    def __getitem__(self, dtype: str) -> float:
        for name, rate in self._items:
            if name == dtype:
                return rate
        raise KeyError(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __repr__(self) -> str:
        return repr(dict(self._items))


@dataclass(frozen=True, init=False)
class Target(Displayed):
    """What the hardware can do; every figure a plan is judged by comes from here.

    ``Target("h200")`` is one GPU from the table, ``Target("8xh100")`` one host with eight,
    ``Target("4x8xh100")`` four such hosts, ``Target("cpu")`` this machine's processor and
    ``Target.local()`` this machine's default JAX device. Fields given as keywords replace those
    of the table: ``Target("h100", h2d_bytes_per_second=20e9)``.

    Attributes:
        name: as messages print it, for instance ``"8xh100"``.
        platform: ``"gpu"`` or ``"cpu"``.
        model: the table's name of the GPU; ``""`` for a CPU or a GPU that the table lacks.
        device_bytes: usable bytes of each device; for GPUs of the table 95% of the memory.
        host_bytes: bytes of memory of each host.
        pinned_host_bytes: of these, what one process may pin and so what a plan may offload to; for
            GPUs of the table the 64 GiB that XLA allows by default.
        flops: dense FLOP/s of matrix multiplication by dtype name (``"bfloat16"``,
            ``"float16"``, ``"float32"``, ``"float64"``, ``"int8"``, ``"float8"``); float32 is
            TF32 where the GPU has it, as JAX multiplies by default.
        hbm_bytes_per_second: device memory bandwidth.
        h2d_bytes_per_second: host to each device while nothing goes back; as measured here, while
            every device of the process copies.
        d2h_bytes_per_second: each device to host, likewise; 0 where nothing is to be moved there.
        duplex_bytes_per_second: between device and host, each way while both run.
        d2d_bytes_per_second: device to device inside a host, one direction.
        devices_per_host: devices in each host.
        hosts: hosts.
        sources: where the figures come from; those nobody looked up say ``assumed``.

    Raises:
        UnknownTargetError: no target has that name.
        ArgumentError: a field that targets do not have, or a figure that no machine has, such as
            a rate of 0.

    >>> target = Target("4x8xH100-SXM")
    >>> target.name, target.device_count, target.flops["bfloat16"]
    ('4x8xh100', 32, 989400000000000.0)
    """

    name: str
    platform: Literal["gpu", "cpu"]
    model: str
    device_bytes: int
    host_bytes: int
    pinned_host_bytes: int
    flops: Flops
    hbm_bytes_per_second: float
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    duplex_bytes_per_second: float
    d2d_bytes_per_second: float
    devices_per_host: int
    hosts: int
    sources: tuple[str, ...]

    def __init__(self, name: str, **given: Any):
        names = [field.name for field in fields(Target)]
        if wrong := sorted(set(given) - set(names)):
            raise ArgumentError(
                f"Target has no field {wrong[0]!r}; its fields are {', '.join(names)}"
            )
        values = {"name": name, **given}
        if missing := set(names) - set(values):
            known = _from_name(name)
            values.update({field: known[field] for field in missing}, name=known["name"])
        values["flops"] = _checked_flops(values["flops"])
        _check_figures(values)
        values["sources"] = tuple(values["sources"])
        for field in names:
            object.__setattr__(self, field, values[field])

    @staticmethod
    def local(measure: bool | None = None) -> Target:
        """Returns this machine's default JAX device, and as many of them as JAX sees.

        Its memory is what JAX may allocate. A GPU's rates are measured once and kept in the user's
        cache directory (``JAXMEM_CACHE_DIR``, ``XDG_CACHE_HOME``), because the same step and budget
        must give the same plan tomorrow and no two measurements are alike; ``jaxmem doctor
        --measure`` measures again. A CPU's rates are assumed unless asked for: a plan for a CPU
        compares arithmetic with one memory, for which the assumed ratio does, and starting up would
        take seconds. Several processes of one program use the table: they have to make the same
        plan, and each would measure its own rates. ``sources`` says where the rates are from.

        Args:
            measure: ``None`` measures on a GPU of a single process, ``True`` anywhere; ``False``
                takes a GPU's rates from the table (scaled by its multiprocessors where the table
                lacks it) and assumes a CPU's. Where measuring fails the table is used, and
                ``sources`` begins with the reason.

        Raises:
            TargetError: the default device is neither a CPU nor an NVIDIA GPU.

        Cost:
            The first time on a machine some seconds, at most half of the free device memory and
            1.5 GiB of it, and 0.4 GiB of pinned host memory; afterwards nothing.

        >>> Target.local().platform in ("cpu", "gpu")
        True
        """
        from jaxmem.targets import local

        return Target(**local.default_device(measure))

    @staticmethod
    def resolve(target: Target | str | None) -> Target:
        """Returns ``target`` itself, the target of that name, or for ``None`` this machine.

        Raises:
            UnknownTargetError: no target has that name.
            ArgumentError: not a target, a name or ``None``.

        >>> Target.resolve("h200") == Target.resolve(Target("h200"))
        True
        """
        if isinstance(target, Target):
            return target
        if target is None:
            return Target.local()
        if isinstance(target, str):
            return Target(target)
        raise ArgumentError(f"target must be a Target, a name or None, not {type(target).__name__}")

    @property
    def device_count(self) -> int:
        """Devices of all hosts together."""
        return self.hosts * self.devices_per_host

    def flops_per_second(self, dtype: str) -> float:
        """Returns the rate for a dtype name; ``float8_*`` is float8, what is unknown is float32.

        >>> target = Target("h200")
        >>> target.flops_per_second("float8_e4m3fn") == target.flops["float8"]
        True
        """
        if dtype.startswith("float8"):
            dtype = "float8" if "float8" in self.flops else "bfloat16"
        elif dtype == "uint8":
            dtype = "int8"
        return self.flops[dtype if dtype in self.flops else "float32"]

    def __str__(self) -> str:
        memory = f"{units.format_bytes(self.device_bytes)} usable"
        return f"{self.name} ({memory}{' each' if self.device_count > 1 else ''})"


def _checked_flops(given: Any) -> Flops:
    try:
        found = Flops(given)
    except (AttributeError, TypeError, ValueError):
        found = None
    if not found or "float32" not in found:
        raise ArgumentError(
            f"flops={given!r} of a target: give FLOP/s by dtype name, that of float32 among them, "
            'such as {"bfloat16": 989e12, "float32": 494e12}.'
        )
    return found


def _check_figures(values: Mapping[str, Any]) -> None:
    """Refuse what would divide by nothing, or compare with no number, deep inside a plan."""
    rates = {name: value for name, value in values.items() if name.endswith("_per_second")}
    rates |= {f"flops[{dtype!r}]": value for dtype, value in values["flops"].items()}
    for name, value in rates.items():
        no_link = name == "d2h_bytes_per_second" and value == 0
        if not no_link and not (isinstance(value, float | int) and value > 0):
            raise ArgumentError(f"{name}={value!r} of a target is no rate. Give a number above 0.")
    least = {"device_bytes": 1, "host_bytes": 0, "pinned_host_bytes": 0}
    for name, fewest in {**least, "devices_per_host": 1, "hosts": 1}.items():
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < fewest:
            raise ArgumentError(
                f"{name}={value!r} of a target: give a whole number, {fewest} or more."
            )


def _from_name(name: str) -> dict[str, Any]:
    if not isinstance(name, str):
        raise ArgumentError(f"a target name is text such as 'h200' or '8xh100', not {name!r}")
    if name.strip().lower() == "cpu":
        from jaxmem.targets import local

        return local.processor()
    model, hosts, devices = table.parse(name)
    count = f"{hosts}x{devices}x" if hosts > 1 else f"{devices}x" if devices > 1 else ""
    one = from_table(model)
    host_bytes = 2 * table.gpu(model)["memory_bytes"] * devices
    return {
        **one,
        "name": count + model,
        "hosts": hosts,
        "devices_per_host": devices,
        "host_bytes": host_bytes,
        "pinned_host_bytes": min(host_bytes, DEFAULT_BYTES),
        "sources": (
            *one["sources"],
            "host memory assumed: twice the memory of its GPUs",
            f"pinned host memory: XLA's default, raised by {LIMIT_VARIABLE}",
        ),
    }


def from_table(model: str) -> dict[str, Any]:
    """Fields of one GPU of the table, all but its name and counts."""
    entry = table.gpu(model)
    link = table.load()["host_links"][entry["host_link"]]
    notes = [f"not confirmed: {', '.join(entry['unconfirmed'])}"] if entry["unconfirmed"] else []
    if entry["compiled_as"] != entry["compute_capability"]:
        notes.append(
            f"compiled as compute capability {entry['compiled_as']}: "
            f"CUDA 13 has no {entry['compute_capability']}"
        )
    peer = entry["peer_bytes_per_second"]
    return {
        "platform": "gpu",
        "model": model,
        "device_bytes": int(entry["memory_bytes"] * USABLE_SHARE),
        "flops": entry["flops"],
        "hbm_bytes_per_second": float(entry["memory_bytes_per_second"]),
        "h2d_bytes_per_second": float(link["bytes_per_second"]),
        "d2h_bytes_per_second": float(link["bytes_per_second"]),
        "duplex_bytes_per_second": float(link["duplex_bytes_per_second"]),
        "d2d_bytes_per_second": float(peer or link["bytes_per_second"]),
        "sources": (
            *entry["source"],
            *notes,
            f"host link {link['source']}",
        ),
    }
