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
# # Fine-tune a Flax model inside a budget
#
# A Flax NNX model that was trained on one task learns another, inside a byte budget, and ends
# where it would have ended without one. The model is not touched: `jaxmem.fit` stands where
# `nnx.jit` stood.
#
# ## A model with a past
#
# A residual network that tells which of four waves a noisy signal is. First it is trained on
# clean signals, as usual.

# %%
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmem
from jaxmem.show import tree

WIDTH, BLOCKS, LENGTH, BATCH = 128, 5, 64, 512


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.enter = nnx.Linear(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.leave = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def signals(key, noise):
    kinds, phases, hiss = jax.random.split(key, 3)
    kind = jax.random.randint(kinds, (BATCH,), 0, 4)
    t = jnp.linspace(0, 4 * jnp.pi, LENGTH) + jax.random.uniform(phases, (BATCH, 1)) * 6
    waves = [jnp.sin(t), jnp.sign(jnp.sin(t)), jnp.arcsin(jnp.sin(t)), jnp.sin(t) * jnp.sin(2 * t)]
    x = jnp.stack(waves)[kind, jnp.arange(BATCH)]
    return x + noise * jax.random.normal(hiss, x.shape), kind


def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def pretrained():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    step = nnx.jit(train_step)
    for n in range(30):
        loss = step(model, optimizer, *signals(jax.random.key(n), noise=0.0))
    return model, float(loss)


def accuracy(model, noise):
    x, y = signals(jax.random.key(12345), noise)
    return float((model(x).argmax(-1) == y).mean())


model, loss = pretrained()
print(f"after pretraining: loss {loss:.3f}, {accuracy(model, 0.0):.0%} right on clean signals")
print(f"                   and {accuracy(model, 1.0):.0%} on noisy ones")

# %% [markdown]
# ## What fine-tuning would take
#
# The state first: the model and the moments of a new optimizer. Equal blocks are shown once.

# %%
tx = optax.adamw(3e-4)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
print(tree({"model": model, "optimizer": optimizer}))

# %% [markdown]
# And the whole step, as it is written:

# %%
batch = signals(jax.random.key(100), noise=1.0)
report = jaxmem.analyze(train_step, model, optimizer, *batch)
for category, nbytes in report.by_category().items():
    print(f"{category:13} {nbytes / 2**20:5.1f} MiB at the peak")
print(f"{'compiled':13} {report.compiled_bytes / 2**20:5.1f} MiB in all")

# %% [markdown]
# ## Inside a budget
#
# Let the budget be 60% of that. Model and optimizer are donated: they change in place.

# %%
budget = report.compiled_bytes * 6 // 10
fine_tune = jaxmem.fit(train_step, budget=budget, donate_argnums=(0, 1))
fine_tune.plan(model, optimizer, *batch)

# %% [markdown]
# ## The same end
#
# Both ways from the same model, on the same batches.


# %%
def tuned(step):
    model = nnx.clone(first)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = [
        float(step(model, optimizer, *signals(jax.random.key(1000 + n), noise=1.0)))
        for n in range(12)
    ]
    return losses, model


first = model
plain_losses, plain = tuned(nnx.jit(train_step))
losses, planned = tuned(fine_tune)
for n in (0, 5, 11):
    print(f"step {n + 1:2}: loss {plain_losses[n]:.4f} as written, {losses[n]:.4f} in the budget")
print(f"noisy signals: {accuracy(plain, 1.0):.0%} right as written, {accuracy(planned, 1.0):.0%}")
assert max(abs(a - b) for a, b in zip(plain_losses, losses, strict=True)) < 0.01

# %% [markdown]
# A fitted step tells what it was asked for and what it planned so far:

# %%
fine_tune
