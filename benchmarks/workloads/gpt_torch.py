"""The GPT of gpt.py in PyTorch: the same net, shapes, dtypes and optimizer."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads.base import TorchWorkload
from benchmarks.workloads.text_sizes import GPT_SIZES, GPTSizes

SIZES = GPT_SIZES


class Norm(nn.Module):
    """Layer normalisation without a bias, in the dtype of its input.

    Autocast would compute it in float32 and keep a float32 copy of its input for the backward
    pass; the statistics are float32 here too.
    """

    def __init__(self, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-6)


class Attention(nn.Module):
    """Causal self-attention, ``[batch, sequence, d_model]`` to the same shape."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, d_model = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, d_model // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, d_model))


class MLP(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, d_model: int):
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.attention_norm = Norm(d_model)
        self.attention = Attention(d_model, heads)
        self.mlp_norm = Norm(d_model)
        self.mlp = MLP(d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens ``[batch, sequence]`` to next-token logits ``[batch, sequence, vocab_size]``."""

    def __init__(self, sizes: GPTSizes):
        super().__init__()
        self.dtype = getattr(torch, sizes.dtype)
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.positions = nn.Embedding(sizes.sequence, sizes.d_model)
        self.blocks = nn.ModuleList(Block(sizes.d_model, sizes.heads) for _ in range(sizes.layers))
        self.norm = Norm(sizes.d_model)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens).to(self.dtype) + self.positions(positions).to(self.dtype)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def workload(sizes: GPTSizes, device: str | torch.device) -> TorchWorkload:
    """The train step of ``sizes``, one of ``SIZES``, with its parameters made on ``device``."""
    device = torch.device(device)
    torch.manual_seed(0)
    with device:
        model = GPT(sizes).train()
        tokens = torch.randint(sizes.vocab_size, (sizes.batch, sizes.sequence + 1))
    adamw = sizes.adamw
    return TorchWorkload(
        model=model,
        blocks=list(model.blocks),
        loss=partial(_loss, enabled=model.dtype != torch.float32),
        batch={"tokens": tokens},
        optimizer=partial(
            torch.optim.AdamW,
            lr=adamw.learning_rate,
            betas=(adamw.b1, adamw.b2),
            eps=adamw.eps,
            weight_decay=adamw.weight_decay,
            fused=device.type == "cuda",
        ),
        items=sizes.batch * sizes.sequence,
    )


def _loss(model: GPT, batch: dict[str, torch.Tensor], enabled: bool) -> torch.Tensor:
    tokens = batch["tokens"]
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=enabled):
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
