"""Train a GPT over the devices of one or several processes, and go on where it was ended.

On one machine, two processes with two CPU devices each: ``python examples/train_distributed.py
--local 2 --devices 2 /tmp/run``. On the GPUs of one machine: without ``--local``. On a cluster, one
process for each GPU: ``srun python examples/train_distributed.py --cluster /shared/run``.

Run it again after ``kill -9`` and it goes on from the newest checkpoint, on CPUs to the very same
losses; on GPUs XLA may choose other kernels in each process. Told to stop (SIGTERM), it saves and
exits with code 0.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from models.gpt import GPT, GPTConfig

import jaxmem
from jaxmem.units import format_bytes

CONFIG = GPTConfig(layers=4, heads=4, d_model=128, sequence=64, scan_layers=True)


# The training: a model in Flax NNX whose state is one tree of arrays.


def first_state(config: GPTConfig) -> nnx.State:
    """Parameters and AdamW's state; the same at every call."""
    model = GPT(config, rngs=nnx.Rngs(0))
    return nnx.state((model, nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)))


def make_train_step(config: GPTConfig) -> Any:
    """A step from the state and tokens ``[batch, sequence + 1]`` to the new state and the loss."""

    def objects() -> tuple[GPT, nnx.Optimizer]:
        model = GPT(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    graph, _ = nnx.split(nnx.eval_shape(objects))

    def train_step(state: nnx.State, tokens: jax.Array) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state)

        def loss_fn(model: GPT) -> jax.Array:
            logits = model(tokens[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return train_step


class Batches:
    """Random windows of Python's help text as bytes; the same for the same step."""

    def __init__(self, config: GPTConfig, batch: int, mesh: jax.sharding.Mesh):
        topics = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        tokens = np.frombuffer(text, np.uint8).astype(np.int32)
        self.windows = np.lib.stride_tricks.sliding_window_view(tokens, config.sequence + 1)
        self.batch, self.sharding = batch, NamedSharding(mesh, PartitionSpec("data"))

    def __getitem__(self, step: int) -> jax.Array:
        drawn = np.random.default_rng(step).integers(len(self.windows), size=self.batch)
        shape = (self.batch, self.windows.shape[1])
        # Each process reads only the rows of its own devices.
        return jax.make_array_from_callback(
            shape, self.sharding, lambda index: self.windows[drawn[index[0]]][:, index[1]]
        )


def train(options: argparse.Namespace) -> None:
    """Train to the last step, or until the job is told to stop."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    shapes = jax.eval_shape(lambda: first_state(CONFIG))
    layout = jaxmem.shard(shapes, mesh, options.shard)
    step = jaxmem.fit(
        make_train_step(CONFIG),
        donate_argnums=0,
        mesh=mesh,
        shard=layout,
        budget=options.budget,
        progress=False,
    )
    begin, state = resumed(options.directory, shapes, layout)
    batches = Batches(CONFIG, options.batch, mesh)
    plan = step.plan(state, batches[begin])
    say(
        f"{jax.process_count()} processes, {jax.device_count()} devices, "
        f"{format_bytes(plan.compiled_bytes)} on each; from step {begin}"
    )
    saving = None
    for number in range(begin, options.steps):
        state, loss = step(state, batches[number])
        say(f"step {number} loss {float(loss):.6f}")
        last = number + 1 == options.steps or jaxmem.preempted(number)
        if last or (number + 1) % options.every == 0:
            saving = jaxmem.save(options.directory, {"train": state}, step=number, keep=2)
        if last:
            break
    if saving is not None:
        saving.wait()
        say(f"saved {saving.path}")


def resumed(directory: Path, shapes: Any, layout: Any) -> tuple[int, Any]:
    """The step to begin with and its state: of the newest checkpoint, else a new one."""
    numbers = [int(p.name) for p in directory.glob("*") if p.name.isdecimal()]
    if not numbers:
        return 0, jax.jit(lambda: first_state(CONFIG), out_shardings=layout.shardings)()
    like = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        layout.shardings,
    )
    newest = max(numbers)
    return newest + 1, jaxmem.restore(directory, {"train": like}, step=newest)["train"]


def say(line: str) -> None:
    """Print a line once, not once for each process."""
    if jax.process_index() == 0:
        print(line, flush=True)


# Starting processes.


def start_local(arguments: list[str], count: int, devices: int) -> int:
    """Run this script in ``count`` processes with CPU devices; returns the exit code."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    command = [sys.executable, __file__, *arguments, "--coordinator", f"127.0.0.1:{port}"]
    children = [
        subprocess.Popen([*command, "--number", str(n)], env=environment, stdin=subprocess.PIPE)
        for n in range(count)
    ]
    signal.signal(signal.SIGTERM, lambda *_: children[0].terminate())
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children):
            for child in children:  # They would wait for the one that failed.
                child.kill()
        time.sleep(0.05)
    return max((child.returncode for child in children), key=abs)


def join_others(options: argparse.Namespace) -> None:
    """Make this one of several processes, if it is."""
    if options.coordinator:
        # The process that started this one holds the other end, and may be killed.
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
        jax.distributed.initialize(options.coordinator, options.local, options.number)
    elif options.cluster:
        jax.distributed.initialize()


def main(arguments: list[str] | None = None) -> int:
    """Run the example; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", type=Path, help="of the checkpoints; all processes see it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    parser.add_argument("--batch", type=int, default=16, help="sequences, of all devices together")
    parser.add_argument("--shard", default="zero3", choices=["zero1", "zero3"])
    parser.add_argument("--budget", help="of each device, such as 40GiB; default: what it has")
    parser.add_argument("--local", type=int, help="start so many processes here, with CPU devices")
    parser.add_argument("--devices", type=int, default=2, help="of each of them")
    parser.add_argument("--cluster", action="store_true", help="one process of a cluster's job")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.local and not options.coordinator:
        return start_local(given, options.local, options.devices)
    join_others(options)
    try:
        train(options)
    except jaxmem.JaxmemError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
