"""Which values a rule is about: names, module path, primitive, dtype, size, FLOPs per byte."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex, TypedDict

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.errors import BudgetError, PolicyError
from jaxmem.policies.facts import Facts
from jaxmem.units import parse_bytes

_DTYPES = (
    "bfloat16 float8_e4m3fn float8_e5m2 float16 float32 float64 int2 int4 int8 int16 int32 int64 "
    "uint2 uint4 uint8 uint16 uint32 uint64 bool complex64 complex128"
).split()
_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


class Fields(TypedDict, total=False):
    """The keywords of a rule; see :func:`jaxmem.policies.save`."""

    module: str | Sequence[str]
    primitive: str | Sequence[str]
    dtype: Any
    min_bytes: str | SupportsIndex
    max_bytes: str | SupportsIndex
    min_flops_per_byte: float
    max_flops_per_byte: float
    batch_dims: int


@dataclass(frozen=True)
class Selector:
    """All that is given must hold; of several names, modules, primitives or dtypes one must.

    Attributes:
        names: globs on checkpoint names.
        module: globs on a run of names in the module path; what is inside a module belongs to it.
        primitive: names of primitives.
        dtype: names of dtypes.
        min_bytes: smallest size of the value; ``max_bytes`` the largest, both included.
        min_flops_per_byte: least arithmetic intensity of the operation that makes the value;
            ``max_flops_per_byte`` the most, both included.
        batch_dims: number of batch dimensions of a matrix product.
    """

    names: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    primitive: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    min_bytes: int | None = None
    max_bytes: int | None = None
    min_flops_per_byte: float | None = None
    max_flops_per_byte: float | None = None
    batch_dims: int | None = None

    def matches(self, facts: Facts) -> bool:
        """Whether the rule is about a value."""
        return self.is_named(facts) and self.is_measured(facts)

    def is_named(self, facts: Facts) -> bool:
        """The part of a match that does not depend on sizes."""
        return (
            (not self.names or any(name_matches(g, facts.names) for g in self.names))
            and (not self.module or any(module_matches(g, facts.module) for g in self.module))
            and (not self.primitive or facts.primitive in self.primitive)
            and (not self.dtype or facts.dtype in self.dtype)
            and (self.batch_dims is None or self.batch_dims == facts.batch_dims)
        )

    def is_measured(self, facts: Facts) -> bool:
        """The part of a match that depends on sizes."""
        return _within(facts.nbytes, self.min_bytes, self.max_bytes) and _within(
            facts.flops_per_byte, self.min_flops_per_byte, self.max_flops_per_byte
        )

    @property
    def needs_results(self) -> bool:
        """Whether the result of the operation must be known, not only its name and operands."""
        sizes = (self.min_bytes, self.max_bytes, self.min_flops_per_byte, self.max_flops_per_byte)
        return bool(self.dtype) or any(size is not None for size in sizes)

    def given(self) -> dict[str, Any]:
        """The fields that say something, as they would be written, in order."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in values.items() if v not in ((), None)}

    def arguments(self) -> str:
        """The fields as arguments of a call."""
        given = self.given()
        written = [repr(name) for name in given.pop("names", ())]
        for key, value in given.items():
            alone = isinstance(value, tuple) and len(value) == 1
            written.append(f"{key}={(value[0] if alone else value)!r}")
        return ", ".join(written)


def selector(names: Iterable[Any], given: Mapping[str, Any], rule: str) -> Selector:
    """The selector that the arguments of a rule say.

    Raises:
        PolicyError: no field, an unknown one, or a value that no array can have.
    """
    known = [f.name for f in fields(Selector)][1:]
    for key in given:
        if key not in known:
            raise PolicyError(
                f"{rule}() has no field {key!r}{_nearest(key, known)} "
                f"Use checkpoint names, or {', '.join(known)}."
            )
    found = Selector(
        names=_texts(names, "a checkpoint name", rule),
        module=_texts(_several(given.get("module")), "module", rule),
        primitive=_primitives(_texts(_several(given.get("primitive")), "primitive", rule)),
        dtype=tuple(sorted({_dtype(d) for d in _several(given.get("dtype"))})),
        min_bytes=_bytes(given.get("min_bytes"), "min_bytes"),
        max_bytes=_bytes(given.get("max_bytes"), "max_bytes"),
        min_flops_per_byte=_intensity(given.get("min_flops_per_byte"), "min_flops_per_byte"),
        max_flops_per_byte=_intensity(given.get("max_flops_per_byte"), "max_flops_per_byte"),
        batch_dims=_count(given.get("batch_dims")),
    )
    _check_range(found.min_bytes, found.max_bytes, "bytes", rule)
    _check_range(found.min_flops_per_byte, found.max_flops_per_byte, "flops_per_byte", rule)
    if not found.given():
        raise PolicyError(
            f"{rule}() says nothing about which values. Name some, {rule}('attn*'), or use "
            "policies.everything or policies.nothing."
        )
    return found


def name_matches(glob: str, names: Iterable[str]) -> bool:
    """Whether a glob matches one of the names."""
    return any(fnmatch.fnmatchcase(name, glob) for name in names)


def module_matches(glob: str, path: str) -> bool:
    """Whether a glob matches a run of names in a module path.

    >>> [module_matches("Block_*/mlp", p) for p in ("Net/Block_3/mlp/Dense_0", "Net/Block_3/attn")]
    [True, False]
    """
    wanted, parts = glob.split("/"), path.split("/") if path else []
    return any(
        all(map(fnmatch.fnmatchcase, parts[start : start + len(wanted)], wanted))
        for start in range(len(parts) - len(wanted) + 1)
    )


def nearest(wanted: str, among: Iterable[str]) -> list[str]:
    """The names most like ``wanted``, the nearest first."""
    plain = wanted.strip("*?")
    return difflib.get_close_matches(plain, list(dict.fromkeys(among)), n=3, cutoff=0.4)


def _nearest(wanted: str, among: Iterable[str]) -> str:
    found = nearest(wanted, among)
    return f": did you mean {' or '.join(map(repr, found))}?" if found else "."


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple | set | frozenset) else (given,)


def _texts(given: Iterable[Any], field: str, rule: str) -> tuple[str, ...]:
    texts = tuple(given)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise PolicyError(f"{rule}({text!r}): {field} is text that is not empty.")
    return tuple(sorted(set(texts)))


def _primitives(names: tuple[str, ...]) -> tuple[str, ...]:
    known = _compat.primitive_names()
    for name in names:
        # One of a library that is not imported yet is not known; it looks like no other.
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.75)
        if name not in known and close:
            raise PolicyError(
                f"primitive={name!r} is not a primitive of jax {jax.__version__}: did you mean "
                f"{' or '.join(map(repr, close))}?"
            )
    return names


def _dtype(given: Any) -> str:
    if isinstance(given, str) and given.startswith("key<"):
        return given
    try:
        return str(jnp.dtype(given))
    except TypeError as error:
        text = str(given)
        close = [_SHORT[text]] if text in _SHORT else nearest(text, _DTYPES)
        hint = f": did you mean {' or '.join(map(repr, close))}?" if close else "."
        raise PolicyError(f"dtype={given!r} is not a dtype{hint}") from error


def _bytes(given: Any, field: str) -> int | None:
    try:
        return None if given is None else parse_bytes(given)
    except BudgetError as error:
        raise PolicyError(f"{field}: {error}") from error


def _intensity(given: Any, field: str) -> float | None:
    if given is None:
        return None
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not math.isfinite(given) or given < 0:
        raise PolicyError(f"{field}={given!r} is not a number of FLOPs per byte, 0 or more.")
    return float(given)


def _count(given: Any) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise PolicyError(f"batch_dims={given!r} is not a number of dimensions, 0 or more.")
    return given


def _check_range(least: float | None, most: float | None, what: str, rule: str) -> None:
    if least is not None and most is not None and least > most:
        raise PolicyError(
            f"{rule}(min_{what}={least!r}, max_{what}={most!r}) contradicts itself: no value is at "
            "least the one and at most the other."
        )


def _within(number: float, least: float | None, most: float | None) -> bool:
    return (least is None or number >= least) and (most is None or number <= most)
