# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Plan for a GPU that you do not have
#
# Which GPU do I need? Does this change still fit the cluster? With `pip install
# "jaxmem[plan-gpu]"` the real XLA:GPU compiler runs on a laptop, without a GPU and without a CUDA
# toolkit. The bytes below are its own figures for each GPU; seconds are predicted.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # There is no GPU here; without this JAX looks for one, loudly.

import jax
import jax.numpy as jnp
import optax

import jaxmem

# %% [markdown]
# ## What a target is
#
# A name from a table of GPUs, with their memory, arithmetic and links, and where each figure is
# from. `8xh100` is a host with eight, `4x8xh100` four such hosts.

# %%
jaxmem.Target("h100")

# %% [markdown]
# ## A step that this machine could not hold
#
# Shapes stand for the arrays: nothing is allocated.

# %%
LAYERS, WIDTH, BATCH = 24, 2048, 65536
tx = optax.adam(1e-3)


def loss_fn(params, x):
    def layer(x, w):
        up = jax.nn.gelu(x @ w["up"].astype(x.dtype))
        return x + up @ w["down"].astype(x.dtype), None

    return (jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2).mean()


def train_step(state, x):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def first_state():
    params = {
        "up": jnp.zeros((LAYERS, WIDTH, 4 * WIDTH)),
        "down": jnp.zeros((LAYERS, 4 * WIDTH, WIDTH)),
    }
    return {"params": params, "opt_state": tx.init(params)}


state = jax.eval_shape(first_state)
batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16)
count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
print(f"{count / 1e6:.0f} million parameters, batch {BATCH:,} x {WIDTH:,}")

# %%
report = jaxmem.analyze(train_step, state, batch, target="h100", donate_argnums=0)
print(f"as written it takes {report.compiled_bytes / 2**30:.1f} GiB")

# %% [markdown]
# ## Which GPU?
#
# One plan for each of a few GPUs. Where the step does not fit as it is written, it recomputes;
# where even that is not enough, the error says what would be.

# %%
plans = {}
for name in ("l4", "a100-40", "h100"):
    try:
        plan = plans[name] = jaxmem.plan(train_step, state, batch, target=name, donate_argnums=0)
        again = sum(d.recomputed for d in plan.decisions)
        print(
            f"{name:8} {plan.compiled_bytes / 2**30:6.1f} of {plan.budget_bytes / 2**30:5.1f} GiB, "
            f"{plan.predicted_seconds * 1e3:6.0f} ms a step predicted, {again} values recomputed"
        )
    except jaxmem.BudgetInfeasibleError as error:
        print(f"{name:8} does not fit: it would take {error.smallest_bytes / 2**30:.1f} GiB")

# %%
smallest = min(plans.values(), key=lambda plan: plan.budget_bytes)
smallest

# %% [markdown]
# ## Several GPUs
#
# The state is split over eight GPUs as ZeRO-3 does it. What each device has of which leaf:

# %%
mesh = jax.sharding.AbstractMesh((8,), ("data",))
layout = jaxmem.shard(state, mesh, "zero3")
print(layout.tree())

# %% [markdown]
# The program for all eight, collectives included, is compiled as well; its bytes are those of
# each.

# %%
sharded = jaxmem.fit(
    train_step, mesh=mesh, shard="zero3", target="8xh100", donate_argnums=0, budget="20GiB"
)
sharded.plan(state, batch)

# %% [markdown]
# ## Take the plan along
#
# A plan is plain data. `plan.save("plan.json")` here, `jaxmem.fit(...,
# plan=jaxmem.Plan.load(...))` there: the same program is compiled, and nothing is searched. In CI
# the command line ends with exit code 2 when a change no longer fits:
#
# ```sh
# jaxmem plan train:entry --target a100-40 --budget 38GiB -o plan.json
# jaxmem diff plan.json train:entry
# ```

# %%
text = smallest.to_json()
assert jaxmem.Plan.from_json(text) == smallest
print(f"{len(text):,} characters of JSON; planned for {smallest.target}")
