"""Check once that this jaxlib computes right from values that waited in host memory.

jaxlib 0.11.0 gave wrong gradients, silently, from scan residuals in host memory
(openxla/xla#46231). So before the first step with values there runs on a GPU, two small nets of the
same make, a scanned and an unrolled one, run with and without their copies. What came of it is kept
for that jaxlib and that GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem import policies
from jaxmem.errors import VerificationError
from jaxmem.program.calling import Caller
from jaxmem.program.ir import Block, has_transfers
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime import rounds, verify
from jaxmem.runtime.compiler import Compiler
from jaxmem.targets.compiling import compile_for, memory_schedules, usable_bytes
from jaxmem.targets.measured import cache_folder, key_of
from jaxmem.targets.target import Target

_LAYERS, _ROWS, _WIDTH = 4, 512, 512
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
    key = {**key_of(jax.devices()[0]), "checked": "offload", "jax": jax.__version__}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    with _lock:
        if name not in _known:
            _known[name] = _kept(cache_folder() / f"offload-{name}.json", target)
        wrong = _known[name]
    if wrong:
        raise VerificationError(
            f"this jaxlib ({key['jaxlib']}) computes wrong numbers on {key['device_kind']} from "
            f"values that waited in host memory: {wrong}\n  openxla/xla#46231 is such a bug, of "
            "jaxlib 0.11.0. Use another jaxlib, or host_budget=0."
        )


def _kept(path: Path, target: Target) -> str:
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
