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
# # Why does my model not fit, and what is the smallest change that fixes it?
#
# A train step needs more memory than the device has. This notebook finds out where the memory
# goes, line by line and before anything runs, and then makes the step fit, with one line more. It
# runs on a CPU; the figures are those of the CPU's compiler. On a GPU the calls are the same.
#
# ## The step
#
# A small transformer, written plainly: four layers, AdamW, nothing about memory in it.

# %%
import jax
import jax.numpy as jnp
import optax

import jaxmem

LAYERS, WIDTH, HEADS, BATCH, LENGTH, WORDS = 4, 128, 4, 8, 128, 512


def attention(w, x):
    q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    mixed = jax.nn.dot_product_attention(
        q.reshape(heads), k.reshape(heads), v.reshape(heads), is_causal=True
    )
    return mixed.reshape(x.shape) @ w["out"]


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    for n, w in enumerate(params["layers"]):
        with jax.named_scope(f"layer{n}"):
            with jax.named_scope("attention"):
                x = x + attention(w, jax.nn.standardize(x))
            with jax.named_scope("mlp"):
                x = x + jax.nn.gelu(jax.nn.standardize(x) @ w["up"]) @ w["down"]
    logits = jax.nn.standardize(x) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


tx = optax.adamw(1e-3)


def train_step(state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def first_state(key):
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    keys = iter(jax.random.split(key, 1 + LAYERS * len(shapes)))
    embed = jax.random.normal(next(keys), (WORDS, WIDTH)) / 8
    layers = [
        {name: jax.random.normal(next(keys), s) / s[0] ** 0.5 / 4 for name, s in shapes.items()}
        for _ in range(LAYERS)
    ]
    params = {"embed": embed, "layers": layers}
    return {"params": params, "opt_state": tx.init(params)}


# %% [markdown]
# ## Where the memory goes
#
# `jaxmem.analyze` traces and compiles the step, and runs nothing. Shapes are enough, so it also
# works for a model that would not fit this machine at all.

# %%
state = jax.eval_shape(first_state, jax.random.key(0))
tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)

report = jaxmem.analyze(train_step, state, tokens)
report

# %% [markdown]
# The curve is the life of a step: the forward pass piles up values that the backward pass will
# need, and the peak is where it turns. The table below the curve says which values those are, by
# the line of the model that made them. The same as data:

# %%
shares = report.by_category()
for category, nbytes in shares.items():
    print(f"{category:13} {nbytes / 2**20:6.1f} MiB  {nbytes / report.peak_bytes:4.0%} of the peak")

# %%
for line, nbytes in list(report.by_source().items())[:5]:
    print(f"{nbytes / 2**20:6.1f} MiB  {line}")

# %% [markdown]
# The state is small beside what is kept for the backward pass ("residual"). So a smaller
# optimizer would not help much, and keeping less would.
#
# ## The smallest change: one line
#
# Say that the device had half of what the step takes. With `jaxmem.fit` the step gets that as its
# budget. Donating the state, as `jax.jit` does with the same option, lets the new state take the
# place of the old one.

# %%
budget = report.compiled_bytes // 2

fitted_step = jaxmem.fit(train_step, budget=budget, donate_argnums=0)  # the one line
plan = fitted_step.plan(state, tokens)
plan

# %% [markdown]
# The verdict is the second line: how many values are computed again in the backward pass, and
# what that is predicted to cost. Each row of the table is a group of equal values of the layers.
# Why is a value not kept? The plan can say:

# %%
plan.explain("mlp")

# %% [markdown]
# ## It computes the same
#
# The fitted step runs like any other. Its first call compiles and checks the program that was
# planned.


# %%
def train(step, steps=5):
    state, losses = first_state(jax.random.key(0)), []
    for n in range(steps):
        batch = jax.random.randint(jax.random.key(n), (BATCH, LENGTH + 1), 0, WORDS)
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


written, planned = train(jax.jit(train_step, donate_argnums=0)), train(fitted_step)
print("as written:", *(f"{loss:.5f}" for loss in written))
print("planned:   ", *(f"{loss:.5f}" for loss in planned))
assert max(abs(a - b) for a, b in zip(written, planned, strict=True)) < 1e-4

# %% [markdown]
# ## When nothing fits
#
# A budget below what any plan can reach raises, before anything runs. The error names the
# smallest budget that works, what fills it, and what would lower it.

# %%
try:
    jaxmem.plan(train_step, state, tokens, budget=report.argument_bytes, donate_argnums=0)
except jaxmem.BudgetInfeasibleError as error:
    smallest = error.smallest_bytes
    print(error)

# %%
print(f"as written {report.compiled_bytes / 2**20:.1f} MiB")
print(f"planned    {plan.compiled_bytes / 2**20:.1f} MiB for {budget / 2**20:.1f} MiB")
print(f"smallest   {smallest / 2**20:.1f} MiB")
