"""BERT with its masked-language-model head, in Flax Linen: post-norm blocks, tied output head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike


@dataclass(frozen=True)
class BertConfig:
    """The shape of a BERT; the defaults are BERT-Large's, without dropout.

    Attributes:
        vocab_size: number of tokens.
        layers: number of blocks.
        heads: attention heads; must divide ``d_model``.
        d_model: width of the residual stream.
        sequence: longest sequence, in tokens.
        segments: how many texts a sequence may be made of.
        dtype: dtype of the computation.
        param_dtype: dtype of the parameters, and so of the optimizer state.
        attention: ``implementation=`` of ``jax.nn.dot_product_attention``; ``"cudnn"`` is flash
            attention, on NVIDIA GPUs and in half precision only.
        remat_policy: a policy of ``jax.checkpoint_policies`` that says what each block saves for
            the backward pass; the rest it computes again. ``None`` saves all of it.
        scan_layers: one block scanned over stacked parameters (compiles fast at any depth) instead
            of one block after another.
    """

    vocab_size: int = 30522
    layers: int = 24
    heads: int = 16
    d_model: int = 1024
    sequence: int = 512
    segments: int = 2
    dtype: DTypeLike = jnp.bfloat16
    param_dtype: DTypeLike = jnp.float32
    attention: str = "xla"
    remat_policy: Callable[..., Any] | None = None
    scan_layers: bool = False


class Attention(nn.Module):
    """Self-attention in both directions, ``[batch, sequence, d_model]`` to the same shape."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, sequence, d_model = x.shape
        heads = self.config.heads
        qkv = checkpoint_name(_dense(self.config, 3 * d_model, "qkv")(x), "qkv")
        qkv = qkv.reshape(batch, sequence, 3, heads, d_model // heads)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(
            query, key, value, implementation=self.config.attention
        )
        mixed = checkpoint_name(mixed.reshape(batch, sequence, d_model), "attention")
        return _dense(self.config, d_model, "out")(mixed)


class MLP(nn.Module):
    """Two linear layers, four times as wide in between."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d_model = self.config.d_model
        up = checkpoint_name(_dense(self.config, 4 * d_model, "up")(x), "mlp_up")
        return _dense(self.config, d_model, "down")(jax.nn.gelu(up))


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream, which is then normalised."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = checkpoint_name(x, "block_in")
        x = x + Attention(self.config, name="attention")(x)
        x = _norm(self.config, "attention_norm")(x)
        x = checkpoint_name(x, "block_mid")
        x = x + MLP(self.config, name="mlp")(x)
        return _norm(self.config, "mlp_norm")(x)


class Bert(nn.Module):
    """Tokens and segments, both ``[batch, sequence]``, to logits at the masked positions.

    Sequences are full: nothing is padded, and every token sees every other.

    >>> model = Bert(BertConfig(layers=2, heads=2, d_model=32, sequence=16))
    >>> tokens, masked = jnp.zeros((3, 16), jnp.int32), jnp.zeros((3, 2), jnp.int32)
    >>> variables = model.init(jax.random.key(0), tokens, tokens, masked)
    >>> model.apply(variables, tokens, tokens, masked).shape
    (3, 2, 30522)
    """

    config: BertConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, segments: jax.Array, masked: jax.Array) -> jax.Array:
        """Args: ``masked`` ``[batch, count]``, the positions to predict.

        Returns:
            ``[batch, count, vocab_size]``.
        """
        config = self.config
        embed = _embedding(config, config.vocab_size, "tokens")
        with jax.named_scope("embed"):
            # Looked up in param_dtype: gradients of rows are summed in it.
            x = jnp.take(embed.embedding, tokens, axis=0).astype(config.dtype)
            # A product, whose gradient is one, too: two rows that all tokens add to are what a
            # GPU's scatter is slowest at.
            kinds = jax.nn.one_hot(segments, config.segments, dtype=config.dtype)
            x = x + kinds @ _embedding(config, config.segments, "segments").embedding.astype(
                config.dtype
            )
            x = x + _embedding(config, config.sequence, "positions")(jnp.arange(tokens.shape[1]))
            x = _norm(config, "norm")(x)
        x = self._blocks(x)
        with jax.named_scope("head"):
            x = jnp.take_along_axis(x, masked[..., None], axis=1)
            x = jax.nn.gelu(_dense(config, config.d_model, "transform")(x))
            logits = embed.attend(_norm(config, "transform_norm")(x))
            bias = self.param("bias", nn.initializers.zeros, config.vocab_size, config.param_dtype)
            return checkpoint_name(logits + bias.astype(logits.dtype), "logits")

    def _blocks(self, x: jax.Array) -> jax.Array:
        config = self.config
        kind = Block
        if config.remat_policy is not None:
            # In a loop's body XLA cannot merge the recomputation with the forward pass anyway.
            kind = nn.remat(Block, policy=config.remat_policy, prevent_cse=not config.scan_layers)
        if not config.scan_layers:
            for index in range(config.layers):
                x = kind(config, name=f"block{index}")(x)
            return x
        scan = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=config.layers,
        )
        return scan(kind(config, name="blocks"), x, None)[0]


def _dense(config: BertConfig, outputs: int, name: str) -> nn.Dense:
    return nn.Dense(
        outputs,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nn.initializers.normal(0.02),
        name=name,
    )


def _norm(config: BertConfig, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(
        epsilon=1e-12, dtype=config.dtype, param_dtype=config.param_dtype, name=name
    )


def _embedding(config: BertConfig, rows: int, name: str) -> nn.Embed:
    return nn.Embed(
        rows,
        config.d_model,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        embedding_init=nn.initializers.normal(0.02),
        name=name,
    )
