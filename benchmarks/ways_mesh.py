"""The ways that ``benchmarks/meshes.py`` compares: FSDP by hand in plain JAX, and jaxmem's."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

PLAIN = ("plain", "constrained")


class Work:
    """The step, its state and its batch, over all devices that are here."""

    def __init__(self, options: argparse.Namespace):
        import jax
        import jax.numpy as jnp
        import optax
        from flax import nnx
        from jax.sharding import AxisType, NamedSharding, PartitionSpec
        from models.gpt import GPT, GPTConfig

        import jaxmem

        self.options = options
        auto = (AxisType.Auto,)
        self.mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
        self.rows = NamedSharding(self.mesh, PartitionSpec("data"))
        self.config = functools.partial(
            GPTConfig,
            vocab_size=options.vocab,
            layers=options.layers,
            heads=options.heads,
            d_model=options.width,
            sequence=options.sequence,
            dtype=jnp.bfloat16,
            scan_layers=not options.unrolled,
            attention=options.attention,
        )
        self.model = lambda config: GPT(config, rngs=nnx.Rngs(0))
        self.tx = optax.adam(1e-4)
        self.shapes = jax.eval_shape(self.first_state)
        self.layouts = {
            rule: jaxmem.shard(self.shapes, self.mesh, rule) for rule in ("zero3", "zero1")
        }

    def first_state(self) -> dict[str, Any]:
        from flax import nnx

        params = nnx.to_pure_dict(nnx.state(self.model(self.config())))
        return {"params": params, "opt": self.tx.init(params)}

    def state(self, rule: str = "zero3") -> dict[str, Any]:
        """A fresh state, made where it belongs."""
        import jax

        return jax.jit(self.first_state, out_shardings=self.layouts[rule].shardings)()

    def tokens(self) -> Any:
        import jax

        shape = (self.options.batch, self.options.sequence + 1)

        def made() -> jax.Array:
            return jax.random.randint(jax.random.key(1), shape, 0, self.options.vocab)

        return jax.jit(made, out_shardings=self.rows)()

    def step(
        self, remat_policy: Callable[..., Any] | None = None, constrained: bool = False
    ) -> Callable[..., Any]:
        import jax
        import jax.numpy as jnp
        import optax
        from flax import nnx

        graph, _ = nnx.split(
            nnx.eval_shape(
                lambda: self.model(
                    self.config(
                        remat_policy=remat_policy, activations=self.rows if constrained else None
                    )
                )
            )
        )

        def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
            logits = nnx.merge(graph, params)(tokens[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        def train_step(state: dict[str, Any], tokens: jax.Array) -> tuple[dict, jax.Array]:
            loss, grads = jax.value_and_grad(loss_of)(state["params"], tokens)
            updates, opt = self.tx.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

        return train_step

    def fitted(self, rule: str = "zero3", **settings: Any) -> Any:
        import jaxmem

        return jaxmem.fit(
            self.step(),
            mesh=self.mesh,
            shard=self.layouts[rule],
            donate_argnums=0,
            target=self.options.budget_of,
            progress=False,
            **settings,
        )

    def plain(self, remat: bool, constrained: bool) -> Any:
        """FSDP by hand: the same specs for what comes in and what goes out.

        ``constrained`` has what blocks hand on split by the batch, too, which the model says.
        """
        import jax

        layout = self.layouts["zero3"].shardings
        policy = jax.checkpoint_policies.nothing_saveable if remat else None
        return jax.jit(
            self.step(policy, constrained),
            donate_argnums=0,
            in_shardings=(layout, self.rows),
            out_shardings=(layout, None),
        )


def way(work: Work, name: str) -> tuple[Callable, dict[str, Any]]:
    """How a row runs, and what is known of it before it does."""
    import jaxmem

    if name.startswith(PLAIN):
        plain = work.plain(name.endswith("remat"), name.startswith("constrained"))
        run = plain.lower(work.shapes, work.tokens()).compile()
        memory = run.memory_analysis()
        total = memory.argument_size_in_bytes + memory.output_size_in_bytes
        total += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        return run, {"compiled_bytes": total}
    started = time.perf_counter()
    settings: dict[str, Any] = {}
    if name == "tight":
        known = known_plan(work)
        settings = {"plan": known, "budget": known.budget_bytes}
    if name == "offload":
        known = offloading_plan(work)
        settings = {"plan": known, "budget": known.budget_bytes}
    if name == "host":
        settings = {"host": "*'opt'*"}
    run = work.fitted("zero1" if name == "zero1" else "zero3", **settings)
    plan: jaxmem.Plan = run.plan(work.shapes, work.tokens())
    return run, {
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.predicted_bytes,
        "compiled_bytes": plan.compiled_bytes,
        "argument_bytes": plan.argument_bytes,
        "host_bytes": plan.host_bytes,
        "exposed_ms": plan.exposed_seconds * 1e3,
        "options": dict(plan.options),
        "predicted_ms": plan.predicted_seconds * 1e3,
        "solver": plan.solver,
        "planning_seconds": time.perf_counter() - started,
    }


def known_plan(work: Work) -> Any:
    """The plan for the smallest budget that is found; it is kept for the process that times."""
    import jaxmem

    path = work.options.plan
    if not path.exists() and work.options.tight:
        work.fitted(budget=work.options.tight).plan(work.shapes, work.tokens()).save(path)
    elif not path.exists():
        try:
            work.fitted(budget=2**20).plan(work.shapes, work.tokens())
        except jaxmem.BudgetInfeasibleError as error:
            work.fitted(budget=error.smallest_bytes).plan(work.shapes, work.tokens()).save(path)
        else:
            raise AssertionError("a MiB was enough")
    return jaxmem.Plan.load(path)


def offloading_plan(work: Work) -> Any:
    """The plan of the row that may use host memory, kept likewise."""
    import jaxmem

    path = work.options.plan.with_suffix(".offload.json")
    if not path.exists():
        asked = {"budget": work.options.offload, "host_budget": work.options.host_budget}
        work.fitted(**asked).plan(work.shapes, work.tokens()).save(path)
    return jaxmem.Plan.load(path)
