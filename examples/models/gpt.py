"""A small, complete GPT in Flax NNX: pre-norm blocks, causal attention, tied output head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        vocab_size: number of tokens; 256 reads raw bytes.
        layers: number of blocks.
        heads: attention heads; must divide ``d_model``.
        d_model: width of the residual stream.
        sequence: longest sequence, in tokens.
        dtype: dtype of the computation.
        param_dtype: dtype of the parameters, and so of the optimizer state.
        scan_layers: one block scanned over stacked parameters (compiles fast at any depth) instead
            of one block after another.
        dropout: probability of dropping a value of a block's output; 0 draws no random numbers.
        attention: ``implementation=`` of ``jax.nn.dot_product_attention``; ``"cudnn"`` is flash
            attention, on NVIDIA GPUs and in half precision only.
        remat_policy: a policy of ``jax.checkpoint_policies`` that says what each block saves for
            the backward pass; the rest it computes again. ``None`` saves all of it.
        activations: the sharding of what blocks hand on, where a mesh is to have it in one
            (``jax.lax.with_sharding_constraint``); ``None`` leaves it to the compiler.
    """

    vocab_size: int = 256
    layers: int = 12
    heads: int = 4
    d_model: int = 128
    sequence: int = 256
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    scan_layers: bool = False
    dropout: float = 0.0
    attention: str = "xla"
    remat_policy: Callable[..., Any] | None = None
    activations: jax.sharding.Sharding | None = None


class Attention(nnx.Module):
    """Causal self-attention, ``[batch, sequence, d_model]`` to the same shape."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.heads = config.heads
        self.implementation = config.attention
        self.qkv = _linear(config, config.d_model, 3 * config.d_model, rngs)
        self.out = _linear(config, config.d_model, config.d_model, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, sequence, d_model = x.shape
        qkv = checkpoint_name(self.qkv(x), "qkv")
        qkv = qkv.reshape(batch, sequence, 3, self.heads, d_model // self.heads)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=self.implementation
        )
        mixed = checkpoint_name(mixed.reshape(batch, sequence, d_model), "attention")
        return self.out(mixed)


class MLP(nnx.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.up = _linear(config, config.d_model, 4 * config.d_model, rngs)
        self.down = _linear(config, 4 * config.d_model, config.d_model, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(checkpoint_name(self.up(x), "mlp_up")))


class Block(nnx.Module):
    """Attention, then an MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)
        self.activations = config.activations

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.activations is not None:
            x = jax.lax.with_sharding_constraint(x, self.activations)
        x = checkpoint_name(x, "block_in")
        with jax.named_scope("attention"):
            x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = checkpoint_name(x, "block_mid")
        with jax.named_scope("mlp"):
            return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nnx.Module):
    """Tokens ``[batch, sequence]`` to next-token logits ``[batch, sequence, vocab_size]``.

    >>> model = GPT(GPTConfig(layers=2, d_model=32, sequence=16), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 16), jnp.int32)).shape
    (3, 16, 256)
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.tokens = _embedding(config, config.vocab_size, rngs)
        self.positions = _embedding(config, config.sequence, rngs)
        self.norm = _norm(config, rngs)
        if config.scan_layers:
            split = nnx.split_rngs(splits=config.layers)
            self.blocks = split(nnx.vmap(lambda rngs: Block(config, rngs=rngs)))(rngs)
        else:
            self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        run = _block_function(self.config)
        if self.config.scan_layers:
            with jax.named_scope("blocks"):
                x = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for index, block in enumerate(self.blocks):
                with jax.named_scope(f"block{index}"):
                    x = run(block, x)
        with jax.named_scope("head"):
            return checkpoint_name(self.tokens.attend(self.norm(x)), "logits")


def _run_block(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


def _block_function(config: GPTConfig) -> Callable[[Block, jax.Array], jax.Array]:
    """Runs a block, under its checkpoint policy if there is one."""
    if config.remat_policy is None:
        return _run_block
    # In a loop's body XLA cannot merge the recomputation with the forward pass anyway.
    return nnx.remat(_run_block, policy=config.remat_policy, prevent_cse=not config.scan_layers)


def _linear(config: GPTConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nnx.initializers.normal(0.02),
        rngs=rngs,
    )


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.d_model,
        use_bias=False,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _embedding(config: GPTConfig, rows: int, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(
        rows,
        config.d_model,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        embedding_init=nnx.initializers.normal(0.02),
        rngs=rngs,
    )
