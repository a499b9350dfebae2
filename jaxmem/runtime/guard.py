"""Check once that this jaxlib computes right from values that waited in host memory.

jaxlib 0.11.0 gave wrong gradients, silently, from scan residuals in host memory
(openxla/xla#46231). So before the first step with values there runs on a GPU, two small nets of the
same make, a scanned and an unrolled one, run with and without their copies. What came of it is kept
for that jaxlib and that GPU.

The same bug makes copies of rows start at the loop's counter, whatever is added to it: in what
jaxlib 0.10.2 compiles, rows that are to be fetched ahead are those of the turn itself. So a small
update by rows is run before the first large one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxlib.version import __version__ as jaxlib_version

from jaxmem import policies
from jaxmem.errors import VerificationError
from jaxmem.program.calling import Caller
from jaxmem.program.cut import cut
from jaxmem.program.ir import Block, Value, has_transfers, in_host_memory
from jaxmem.program.joining import joinable
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.staged import staged
from jaxmem.runtime import rounds, verify
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.parts import compile_parts
from jaxmem.targets.compiling import compile_for, runs_here, usable_bytes
from jaxmem.targets.measured import cache_folder, key_of
from jaxmem.targets.options import memory_schedules
from jaxmem.targets.target import Target

_LAYERS, _ROWS, _WIDTH = 4, 512, 512
_STACKED = 9
_known: dict[str, str] = {}
_lock = threading.Lock()


def check(block: Block, target: Target) -> None:
    """Check this jaxlib before a schedule with values in host memory runs on the GPU that is here.

    Args:
        block: the schedule; one without such values needs no check.
        target: the GPU.

    Raises:
        VerificationError: it computes wrong numbers; the message names the jaxlib.
    """
    if target.platform != "gpu" or not has_transfers(block):
        return
    wrong = _found("offload", wrong_on, target)
    if wrong:
        raise VerificationError(
            f"this jaxlib ({jaxlib_version}) computes wrong numbers on "
            f"{jax.devices()[0].device_kind} from values that waited in host memory: {wrong}\n  "
            "openxla/xla#46231 is such a bug, of jaxlib 0.11.0. Use another jaxlib, or "
            "host_budget=0."
        )


def against_rows(target: Target) -> str:
    """Why this jaxlib must not update leaves by rows on the GPU that is here; "" for no reason."""
    if target.platform != "gpu" or not runs_here(target):
        return ""
    wrong = _found("rows", wrong_by_rows, target)
    return wrong and (
        f"jaxlib {jaxlib_version} gets them wrong on {jax.devices()[0].device_kind}, as "
        f"openxla/xla#46231 would ({wrong})"
    )


def _found(checked: str, wrong_on: Callable[[Target], str], target: Target) -> str:
    """What is wrong with this jaxlib on the GPU that is here; "" for nothing."""
    key = {**key_of(jax.devices()[0]), "checked": checked, "jax": jax.__version__}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    with _lock:
        if name not in _known:
            path = cache_folder() / f"{checked}-{name}.json"
            _known[name] = _kept(path, wrong_on, target)
        return _known[name]


def _kept(path: Path, wrong_on: Callable[[Target], str], target: Target) -> str:
    """What is wrong, as it was found before or is found now; "" for nothing."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text())["wrong"])
    wrong = wrong_on(target)
    with contextlib.suppress(OSError):  # Then the next process checks again.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"wrong": wrong}))
    return wrong


def wrong_on(target: Target) -> str:
    """What comes out wrong of nets with values in host memory; "" for nothing.

    Runs on the device that is here, whatever the target.
    """
    for scanned in (True, False):
        try:
            _compare(scanned, target)
        except VerificationError as error:
            return str(error)
    return ""


def wrong_by_rows(target: Target) -> str:
    """What comes out wrong of updates that go by rows, after a loop and along with one; "" for
    nothing.

    Runs on the device that is here, whatever the target.
    """
    if not runs_here(target):
        target = Target.local(measure=False)
    keys = jax.random.split(jax.random.key(0), 3)
    stacks = [jax.random.normal(key, (_STACKED, _ROWS, _WIDTH)) for key in keys]
    args = (stacks[0], stacks[1], stacks[0].astype(jnp.bfloat16))
    tried = {"an update by rows": (_update, stacks[2]), "one in a loop": (_descend, stacks[2][0])}
    for name, (function, given) in tried.items():
        wrong = _wrong_in_rows(name, function, (*args, given), target)
        if wrong:
            return wrong
    return ""


def _update(master: Any, moment: Any, params: Any, grad: Any) -> Any:
    moment = 0.9 * moment + 0.1 * grad
    master = master - 0.01 * moment
    return master, moment, master.astype(params.dtype)


def _descend(master: Any, moment: Any, params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        x_last, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x * 0.05, params * 0.05)
        return jnp.square(x_last).sum()

    return _update(master, moment, params, jax.grad(loss)(params.astype(jnp.float32)))


def _wrong_in_rows(
    name: str, function: Callable[..., Any], args: Sequence[Any], target: Target
) -> str:
    """What comes out wrong of a step whose first two arguments wait in host memory."""
    caller = Caller(function, (0, 1, 2))
    program = caller.trace(caller.take(tuple(args), {})).program
    pieces = cut(program, range(2), bucket_bytes=2 * _ROWS * _WIDTH * 4, whole_bytes=0)
    block = pieces.first.block
    loops = joinable(block, block.outputs, pieces.parts)
    bounds = sorted({edge for at in loops for edge in (at, at + 1) if edge < len(block.ops)})
    run = staged(pieces, block, bounds, joining=True)
    assert all(part.chunks for part in run.cut.parts if not part.stage)
    assert not loops or any(part.chunks for part in run.cut.parts if part.stage)
    # It writes over them.
    env = dict(zip(program.block.inputs, map(jnp.copy, args), strict=True))
    env.update((v, jax.device_put(env[v], in_host_memory(None))) for v in program.block.inputs[:2])
    first = run.cut.first.block
    outputs = jax.jit(as_function(first))(*(env[v] for v in first.inputs))
    env.update((v, a) for v, a in zip(run.names, outputs, strict=True) if isinstance(v, Value))
    compiled = compile_parts(run.cut.parts, target)
    for part, one in zip(run.cut.parts, compiled, strict=True):
        outputs = one.executable(*(env[v] for v in part.reads))
        env.update((v, a) for v, a in zip(part.names, outputs, strict=True) if isinstance(v, Value))
    found = [env[v] for v in program.block.outputs if isinstance(v, Value)]
    plain = jax.jit(function)

    def nearby() -> Any:
        return plain(*(verify.nudged(a, n) for n, a in enumerate(args)))

    try:
        paths = [leaf.path for leaf in program.results]
        verify.compare(plain(*args), found, paths, name, nearby)
    except VerificationError as error:
        return str(error)
    return ""


def _compare(scanned: bool, target: Target) -> None:
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.tanh(checkpoint_name(x @ w, "product"))

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        if scanned:
            x = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
        else:
            for n in range(_LAYERS):
                x = layer(x, weights[n])
        return jnp.square(x).mean()

    def offloaded(weights: jax.Array, x: jax.Array) -> Any:
        return jax.value_and_grad(loss)(weights, x)

    keys = jax.random.split(jax.random.key(0))
    weights = jax.random.normal(keys[0], (_LAYERS, _WIDTH, _WIDTH)) * 0.05
    x = jax.random.normal(keys[1], (_ROWS, _WIDTH))
    caller = Caller(offloaded)
    call = caller.take((weights, x), {})
    program = caller.trace(call).program
    policy = policies.nothing.override(policies.offload("product"))
    compiler = Compiler(program, target, check=True, policy=policy)
    outcome = rounds.fit(compiler, usable_bytes(target), lambda text: None)
    executable = outcome.compiled.executable
    if not outcome.compiled.runs_here:
        options = memory_schedules(Target.local(measure=False))[-1]
        function = as_function(outcome.block)
        executable = compile_for(None, function, program.avals(), options=options).executable
    plain = compile_for(None, as_function(program.block), program.avals()).executable

    def nearby() -> Any:
        return plain(*program.consts, *(verify.nudged(a, n) for n, a in enumerate((weights, x))))

    inputs = (*program.consts, weights, x)
    paths = [leaf.path for leaf in program.results]
    name = "a scanned net" if scanned else "an unrolled net"
    verify.compare(plain(*inputs), executable(*inputs), paths, name, nearby)
