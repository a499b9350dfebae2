"""How a step is called: any arguments JAX can jit, taken apart into arrays and the rest.

Flax NNX objects are split into arrays and a graph definition with ``nnx.update_context``, so
that what the step changes in them is put back, as with ``nnx.jit``. Equinox modules may hold
leaves that are not arrays; those are part of the signature.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.errors import ArgumentError, TraceError, is_library
from jaxmem.program import leaves, nnx
from jaxmem.program.call import Call
from jaxmem.program.ir import Leaf, Program
from jaxmem.program.microbatches import standing_for
from jaxmem.program.trace import program_from_jaxpr, without_passed_on

# What JAX makes of a function depends on these; they can be changed between two calls.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_rank_promotion",
    "jax_default_device",
)


@dataclass(frozen=True)
class Traced:
    """A step traced for one signature.

    Attributes:
        program: what it does.
        rebuild: turns the flat results of the program and the argument leaves it was called with
            into what the step returns, and updates NNX arguments.
        automatic: the sizes of the batches whose number of microbatches is ``jaxmem.AUTO``.
    """

    program: Program
    rebuild: Callable[[Sequence[Any], Sequence[Any]], Any]
    automatic: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Form:
    """What the structure of the arguments says of their leaves.

    Attributes:
        paths: where each leaf sits.
        donated: whether it belongs to a donated argument.
        modules: positions of the leaves that belong to Equinox modules.
    """

    paths: tuple[str, ...]
    donated: tuple[bool, ...]
    modules: tuple[int, ...]


class Caller:
    """Takes calls of one function apart and traces it."""

    def __init__(
        self,
        fun: Callable[..., Any],
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
    ):
        self.fun = _unwrapped(fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.parameters, self.takes_more = _parameters(self.fun)
        self.donate = _numbers(donate_argnums, "donate_argnums")
        self.static = set(_numbers(static_argnums, "static_argnums"))
        self._check_numbers()
        inner = _jitted(fun)
        if inner is not None:
            self.static |= set(_compat.jit_static_arguments(inner)[0])
        if inner is not None and inner is not self.fun:
            self.donate = (*self.donate, *_compat.jit_donated_arguments(inner))
        self._forms: dict[Hashable, _Form] = {}
        self.static_names = self._names(self.static)
        self.donated_names = self._names(self.donate)
        if inner is not None:
            self.static_names |= set(_compat.jit_static_arguments(inner)[1])

    def _names(self, numbers: Iterable[int]) -> set[str]:
        """Parameters of these numbers: they may be passed by name as well."""
        count = len(self.parameters)
        return {self.parameters[n] for n in numbers if -count <= n < count}

    def _check_numbers(self) -> None:
        count = len(self.parameters)
        for number in (*self.static, *self.donate):
            if not (-count <= number < count or self.takes_more):
                raise ArgumentError(
                    f"there is no argument {number} of {self.name}, which takes {count}: see "
                    "donate_argnums and static_argnums."
                )
        if not self.takes_more:
            # As in jax.jit: the last parameter, whatever a call leaves out.
            self.static = {n % count for n in self.static}
            self.donate = tuple(n % count for n in self.donate)
        both = sorted(self.static & set(self.donate))
        if both:
            raise ArgumentError(f"argument {both[0]} of {self.name} is both static and donated.")

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Take a call apart.

        Raises:
            ArgumentError: an argument that is not an array, a number or a pytree of those.
        """
        count = len(args)
        dynamic, named, static = self.apart(args, kwargs)
        pure = nnx.split((tuple(dynamic.values()), named))
        flat, treedef = jax.tree_util.tree_flatten(pure)
        form = self._forms.get((treedef, count))
        if form is None:
            form = self._forms[treedef, count] = self._form(pure, list(dynamic), count)
        fixed = {n: flat[n] for n in form.modules if leaves.is_whole(flat[n])}
        paths, donated = form.paths, form.donated
        if fixed:
            arrays = [n for n in range(len(flat)) if n not in fixed]
            flat = [flat[n] for n in arrays]
            paths = tuple(paths[n] for n in arrays)
            donated = tuple(donated[n] for n in arrays)
        for leaf, path in zip(flat, paths, strict=True):
            if not _compat.is_concrete(leaf):
                leaves.check_leaf(leaf, path, self.name)
        device = leaves.default_device()
        key = (
            *self.settings(),
            treedef,
            tuple([leaves.signature(leaf, device) for leaf in flat]),
            tuple((n, type(v), _hashable(v, f"static argument {n}")) for n, v in static),
            tuple((n, type(v), _hashable(v, "an Equinox field")) for n, v in sorted(fixed.items())),
        )
        return Call(tuple(flat), paths, donated, key, treedef, fixed, static)

    def apart(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], tuple[tuple[int | str, Any], ...]]:
        """The dynamic arguments by the name of each, those given by name, and the static ones."""
        count = len(args)
        positions = {n % count if n < 0 else n for n in self.static} if count else set()
        static = tuple(
            [(i, a) for i, a in enumerate(args) if i in positions]
            + [(k, v) for k, v in sorted(kwargs.items()) if k in self.static_names]
        )
        dynamic = {self._argument(i): a for i, a in enumerate(args) if i not in positions}
        named = {k: v for k, v in kwargs.items() if k not in self.static_names}
        return dynamic, named, static

    @staticmethod
    def settings() -> tuple[Hashable, ...]:
        """What JAX makes of a function depends on these; two entries."""
        chosen = tuple([getattr(jax.config, setting) for setting in _SETTINGS])
        return chosen, jax.sharding.get_abstract_mesh()

    def _form(self, pure: Any, names: list[str], count: int) -> _Form:
        """What holds for every call of one tree structure."""
        static = {n % count if n < 0 else n for n in self.static} if count else set()
        donate = {n % count if n < 0 else n for n in self.donate} if count else set()
        positions = [i for i in range(count) if i not in static]
        paths, donated = [], []
        for path, _ in jax.tree_util.tree_flatten_with_path(pure)[0]:
            place = path[1:] if isinstance(pure, nnx.Split) else path
            paths.append(_path(place, names))
            second = _index(place[1])
            by_position = _index(place[0]) == 0
            donated.append(
                positions[second] in donate if by_position else second in self.donated_names
            )
        return _Form(tuple(paths), tuple(donated), leaves.module_leaves(pure))

    def _argument(self, index: int) -> str:
        return self.parameters[index] if index < len(self.parameters) else f"args[{index}]"

    def trace(self, call: Call, microbatches: int = 1, *, planned: bool = False) -> Traced:
        """Trace the function for a call.

        Args:
            call: the arguments.
            microbatches: what ``jaxmem.AUTO`` stands for; ``planned`` says that a plan tells.

        Raises:
            TraceError: JAX cannot trace the function; an error of the function's own code is
                not touched.
        """
        told: dict[str, Any] = {}
        held = _in_objects(call)

        def flat(*values: Any) -> list[Any]:
            out = self._run(call, values)
            results, tree = jax.tree_util.tree_flatten_with_path(out)
            modules = set(leaves.module_leaves(out))
            is_array = [
                leaves.is_arraylike(leaf) and not (n in modules and leaves.is_whole(leaf))
                for n, (_, leaf) in enumerate(results)
            ]
            taken = list(zip(results, is_array, strict=True))
            arrays = [leaf for (_, leaf), array in taken if array]
            told.update(
                tree=tree,
                fixed=[None if array else leaf for (_, leaf), array in taken],
                paths=[jax.tree_util.keystr(path) for (path, _), array in taken if array],
                is_array=is_array,
                was=_was(held, out, [path for (path, _), array in taken if array]),
            )
            if len(arrays) != len(results) and not call.fixed:
                bad = next(leaf for (_, leaf), array in taken if not array)
                raise TraceError(
                    f"{self.name} returned a {type(bad).__name__}, which JAX cannot return from a "
                    "compiled step. Return arrays or pytrees of arrays."
                )
            return arrays

        device = leaves.default_device()
        avals = _avals(call)
        try:
            with standing_for(microbatches, planned=planned) as choice:
                traced = jax.jit(flat).trace(*avals)
        except (
            jax.errors.JAXTypeError,
            jax.errors.UnexpectedTracerError,
            jax.errors.JAXIndexError,
        ) as error:
            raise TraceError(_trace_message(self.name, error)) from error
        if foreign := traced.jaxpr.jaxpr.invars[len(avals) :]:
            raise TraceError(_foreign_message(self.name, traced.jaxpr.jaxpr, foreign))
        donated = _inner_donation(traced.jaxpr, call.donated)
        program = program_from_jaxpr(
            traced.jaxpr,
            name=self.name,
            arguments=[Leaf(p, d) for p, d in zip(call.paths, donated, strict=True)],
            results=[Leaf(p) for p in told["paths"]],
            shardings=call.layouts or [leaves.layout(leaf, device) for leaf in call.leaves],
            state=call.state,
        )
        program, passed_on = without_passed_on(program, told["was"])
        rebuild = functools.partial(_rebuild, told, passed_on)
        return Traced(program, rebuild, tuple(choice.sizes))

    def _run(self, call: Call, values: Sequence[Any]) -> Any:
        given = iter(values)
        total = len(values) + len(call.fixed)
        flat = [call.fixed[n] if n in call.fixed else next(given) for n in range(total)]
        pure = jax.tree_util.tree_unflatten(call.treedef, flat)
        merged, finish = nnx.merged(pure)
        dynamic, kwargs = merged
        args = list(dynamic)
        for position, value in call.static:
            if isinstance(position, int):
                args.insert(position, value)
            else:
                kwargs = {**kwargs, position: value}
        return finish(self.fun(*args, **kwargs), merged)


def _in_objects(call: Call) -> dict[str, int]:
    """The argument leaves that NNX objects hold: the number of each by where it is held."""
    total = len(call.leaves) + len(call.fixed)
    pure = jax.tree_util.tree_unflatten(call.treedef, range(total))
    if not isinstance(pure, nnx.Split):
        return {}
    paths = [
        path for path, n in jax.tree_util.tree_flatten_with_path(pure)[0] if n not in call.fixed
    ]
    return {jax.tree_util.keystr(path[1:]): n for n, path in enumerate(paths)}


def _avals(call: Call) -> list[Any]:
    """The types of a call's arguments, laid out as the step wants them."""
    if not call.layouts:
        return [leaves.abstract(leaf) for leaf in call.leaves]
    pairs = zip(call.leaves, call.layouts, strict=True)
    return [leaves.laid_out(leaf, layout) for leaf, layout in pairs]


def _was(held: dict[str, int], out: Any, paths: Iterable[Any]) -> list[int | None]:
    """Of what an NNX object of the caller's holds, the argument that was there; ``None`` else."""
    split = isinstance(out, nnx.Split)
    return [
        held.get(jax.tree_util.keystr(path[2:])) if split and _index(path[1]) == 0 else None
        for path in paths
    ]


def _rebuild(
    told: dict[str, Any], passed_on: dict[int, int], outs: Sequence[Any], given: Sequence[Any]
) -> Any:
    made, total = iter(outs), len(outs) + len(passed_on)
    arrays = iter(given[passed_on[n]] if n in passed_on else next(made) for n in range(total))
    flat = [
        next(arrays) if array else fixed
        for array, fixed in zip(told["is_array"], told["fixed"], strict=True)
    ]
    return jax.tree_util.tree_unflatten(told["tree"], flat)


# --- pieces ------------------------------------------------------------------------------------


def _unwrapped(fun: Any) -> Callable[..., Any]:
    """The function inside ``nnx.jit``: jaxmem splits and merges NNX objects itself."""
    if type(fun).__module__.startswith("flax.nnx") and hasattr(fun, "__wrapped__"):
        if any(getattr(fun, f"{side}_shardings", None) is not None for side in ("in", "out")):
            raise ArgumentError(
                f"{fun.__name__} is under nnx.jit with in_shardings or out_shardings, which jaxmem "
                "does not read. Shard the arguments themselves, and results with "
                "jax.lax.with_sharding_constraint inside the step."
            )
        return fun.__wrapped__
    if isinstance(fun, jax.stages.Compiled):
        raise ArgumentError(
            "jaxmem needs a function, and this one is compiled: pass what it was compiled from."
        )
    if not callable(fun):
        raise ArgumentError(f"jaxmem needs a function, got {type(fun).__name__}: {fun!r}")
    return fun


def _jitted(fun: Any) -> Any:
    """The ``jax.jit`` wrapper that ``fun`` is, or that an ``nnx.jit`` wrapper holds."""
    held = getattr(fun, "jitted_fn", fun) if hasattr(fun, "__wrapped__") else fun
    return held if _compat.is_jitted(held) else None


def _numbers(argnums: Any, option: str) -> tuple[int, ...]:
    given = (argnums,) if hasattr(argnums, "__index__") else argnums
    try:
        return tuple(operator.index(n) for n in given)
    except TypeError:
        raise ArgumentError(
            f"{option} is {argnums!r}: it takes the number of an argument, or several, such as "
            f"{option}=(0, 1)."
        ) from None


def _parameters(fun: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """Names of the positional parameters, and whether there may be more than those."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return (), True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    more = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    return tuple(p.name for p in parameters if p.kind in positional), more


def _index(key: Any) -> Any:
    return getattr(key, "idx", getattr(key, "key", None))


def _path(path: tuple[Any, ...], names: list[str]) -> str:
    """``state.params['w']`` instead of ``[0][0].params['w']``."""
    first = _index(path[1])
    name = names[first] if _index(path[0]) == 0 else str(first)
    return name + jax.tree_util.keystr(path[2:])


def _hashable(value: Any, what: str) -> Hashable:
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"{what} is a {type(value).__name__}, which cannot be hashed; static arguments "
            "must be hashable."
        ) from None
    return value


def _trace_message(name: str, error: Exception) -> str:
    """What JAX could not trace, with the user's own line first."""
    line = ""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    own = [f for f in frames if not is_library(f.filename)]
    if own:
        last = own[-1]
        text = (last.code_context or [""])[0].strip()
        line = f" at {last.filename}:{last.lineno} ({last.function}): {text}"
    first = str(error).strip().splitlines()[0]
    return (
        f"JAX cannot trace {name}{line}\n  {type(error).__name__}: {first}\n  Values that decide "
        "Python control flow or shapes must be static: name them in static_argnums, or use "
        "jax.lax.cond / jnp.where."
    )


def _foreign_message(name: str, jaxpr: Any, foreign: Sequence[Any]) -> str:
    """JAX hands the values of another trace over as further inputs and fails much later."""
    reader = next((e for e in jaxpr.eqns if any(v in foreign for v in e.invars)), None)
    line = None if reader is None else _compat.user_line(reader)
    where = f" at {line[0]}:{line[1]} ({line[2]})" if line else ""
    return (
        f"JAX cannot trace {name}{where}\n  UnexpectedTracerError: it uses a value "
        f"{foreign[0].aval.str_short()} of another trace. Return what a step computes instead of "
        "storing it somewhere, and call a fitted step outside of other JAX transformations."
    )


def _inner_donation(closed: Any, donated: Sequence[bool]) -> tuple[bool, ...]:
    """Donation asked for here, and by the ``jax.jit`` the function already was under."""
    flags = dict(zip(closed.jaxpr.invars, donated, strict=True))
    for eqn in closed.jaxpr.eqns:
        if len(closed.jaxpr.eqns) == 1 and "donated_invars" in eqn.params:
            for atom, given in zip(eqn.invars, eqn.params["donated_invars"], strict=True):
                if given and atom in flags:
                    flags[atom] = True
    return tuple(flags[v] for v in closed.jaxpr.invars)
