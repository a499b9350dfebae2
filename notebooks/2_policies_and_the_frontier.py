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
# # Policies: write them, combine them, compare them
#
# A policy says what of the forward pass is kept for the backward pass. jaxmem plans without one,
# but you may know better, or want to know what the usual ones cost. Here is a net, the curve of
# all that it could do, and a few policies on it. Nothing runs; all seconds are predictions for an
# H100, made on this machine without one.
#
# ## A net with names in it
#
# Layers in a `jax.lax.scan`; two values have names, and the parts have scopes, as Flax would give
# them.

# %%
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem import policies

LAYERS, WIDTH, ROWS = 16, 1024, 8192


def layer(x, w):
    with jax.named_scope("mlp"):
        up = checkpoint_name(x @ w["up"], "up")
        down = checkpoint_name(jax.nn.gelu(up) @ w["down"], "down")
    return x + down, None


def loss_fn(params, x):
    return (jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2).mean()


def train_step(params, x):
    grads = jax.grad(loss_fn)(params, x)
    return jax.tree.map(lambda w, g: w - 0.01 * g, params, grads)


params = {
    "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.bfloat16),
    "down": jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.bfloat16),
}
x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)

# %% [markdown]
# ## What every budget would cost
#
# `jaxmem.frontier` searches for the quickest program of every size. Each blue dot is one; red
# letters are the policies that JAX users write, each as the plan of the whole step.

# %%
curve = jaxmem.frontier(train_step, params, x, target="h100", donate_argnums=0)
curve

# %% [markdown]
# The column `faster` says how much quicker the planned program with no more bytes is. A point of
# the curve as data:

# %%
middle = (curve.points[0].peak_bytes + curve.points[-1].peak_bytes) // 2
point = curve.at(middle)
print(f"within {middle / 2**30:.2f} GiB: {point.seconds * 1e3:.2f} ms a step, by {point.solver}")
print(f"one GiB more would save {curve.marginal(middle) * 1e3:.2f} ms")

# %% [markdown]
# ## Write a policy
#
# Rules select values by checkpoint name, module, primitive, dtype or size, and combine: `|` keeps
# what either keeps, `~` turns a policy round, and with `.override(...)` the last rule that
# selects a value decides. A policy is a value: it prints as its own code.

# %%
keep_narrow = policies.save("down")
keep_products = policies.dots
not_the_wide_ones = keep_products.override(policies.recompute("up"))

for policy in (keep_narrow, keep_products, not_the_wide_ones):
    print(policy)

# %% [markdown]
# Names that match nothing are an error and not silence:

# %%
try:
    jaxmem.plan(train_step, params, x, target="h100", policy=policies.save("dwon"))
except jaxmem.PolicyError as error:
    print(error)

# %% [markdown]
# ## Compare them
#
# `policy=` makes a policy the plan of the whole step, compiled by XLA's own compiler for the
# H100.

# %%
settings = {"target": "h100", "donate_argnums": 0}
plans = {
    str(policy): jaxmem.plan(train_step, params, x, policy=policy, **settings)
    for policy in (policies.everything, keep_products, not_the_wide_ones)
}
for name, plan in plans.items():
    gib, ms = plan.compiled_bytes / 2**30, plan.predicted_seconds * 1e3
    print(f"{gib:5.2f} GiB  {ms:6.2f} ms predicted   {name}")

# %% [markdown]
# Half way: rules that bind the planner, which decides about the rest. Here `up` is never kept,
# and all else is the planner's, inside a budget.

# %%
bound = policies.planned.override(policies.recompute("up"))
budget = plans[str(policies.everything)].compiled_bytes * 2 // 5
mixed = jaxmem.plan(train_step, params, x, budget=budget, policy=bound, **settings)
mixed

# %% [markdown]
# And what the planner does with the same budget when it is free:

# %%
free = jaxmem.plan(train_step, params, x, budget=budget, **settings)
mixed.diff(free)
