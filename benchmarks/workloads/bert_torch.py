"""The BERT of bert.py in PyTorch: the same net, shapes, dtypes and optimizer."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads.base import TorchWorkload
from benchmarks.workloads.text_sizes import BERT_SIZES, BertSizes

SIZES = BERT_SIZES


class Norm(nn.Module):
    """Layer normalisation in the dtype of its input.

    Autocast would compute it in float32 and keep a float32 copy of its input for the backward
    pass; the statistics are float32 here too.
    """

    def __init__(self, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, weight.shape, weight, bias, eps=1e-12)


class Attention(nn.Module):
    """Self-attention in both directions, ``[batch, sequence, d_model]`` to the same shape."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, d_model = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, d_model // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, d_model))


class MLP(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, d_model: int):
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream, which is then normalised."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.attention = Attention(d_model, heads)
        self.attention_norm = Norm(d_model)
        self.mlp = MLP(d_model)
        self.mlp_norm = Norm(d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.mlp_norm(x + self.mlp(x))


class Bert(nn.Module):
    """Tokens and segments, both ``[batch, sequence]``, to logits at the masked positions."""

    def __init__(self, sizes: BertSizes):
        super().__init__()
        d_model = sizes.d_model
        self.dtype = getattr(torch, sizes.dtype)
        self.tokens = nn.Embedding(sizes.vocab_size, d_model)
        self.segments = nn.Embedding(sizes.segments, d_model)
        self.positions = nn.Embedding(sizes.sequence, d_model)
        self.norm = Norm(d_model)
        self.blocks = nn.ModuleList(Block(d_model, sizes.heads) for _ in range(sizes.layers))
        self.transform = nn.Linear(d_model, d_model)
        self.transform_norm = Norm(d_model)
        self.bias = nn.Parameter(torch.zeros(sizes.vocab_size))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(
        self, tokens: torch.Tensor, segments: torch.Tensor, masked: torch.Tensor
    ) -> torch.Tensor:
        """Args: ``masked`` ``[batch, count]``, the positions to predict.

        Returns:
            ``[batch, count, vocab_size]``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens).to(self.dtype) + self.segments(segments).to(self.dtype)
        x = self.norm(x + self.positions(positions).to(self.dtype))
        for block in self.blocks:
            x = block(x)
        x = x.take_along_dim(masked[..., None], dim=1)
        x = self.transform_norm(F.gelu(self.transform(x), approximate="tanh"))
        return F.linear(x, self.tokens.weight, self.bias)


def workload(sizes: BertSizes, device: str | torch.device) -> TorchWorkload:
    """The train step of ``sizes``, one of ``SIZES``, with its parameters made on ``device``."""
    device = torch.device(device)
    torch.manual_seed(0)
    with device:
        model = Bert(sizes).train()
        batch = masked_batch(sizes)
    adamw = sizes.adamw
    return TorchWorkload(
        model=model,
        blocks=list(model.blocks),
        loss=partial(_loss, enabled=model.dtype != torch.float32),
        batch=batch,
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


def masked_batch(sizes: BertSizes) -> dict[str, torch.Tensor]:
    """Random tokens of two segments, of which ``masked`` are hidden and are the labels.

    Returns:
        ``tokens`` and ``segments``: ``[batch, sequence]``; ``masked``, positions in ascending
        order, and ``labels``, the tokens that were there: ``[batch, masked]``.
    """
    shape = (sizes.batch, sizes.sequence)
    tokens = torch.randint(sizes.vocab_size, shape)
    masked = torch.rand(shape).topk(sizes.masked, dim=1).indices.sort(dim=1).values
    halves = (torch.arange(sizes.sequence) >= sizes.sequence // 2).long()
    return {
        "tokens": tokens.scatter(1, masked, sizes.mask_token),
        "segments": halves.expand(shape),
        "masked": masked,
        "labels": tokens.gather(1, masked),
    }


def _loss(model: Bert, batch: dict[str, torch.Tensor], enabled: bool) -> torch.Tensor:
    with torch.autocast(batch["tokens"].device.type, torch.bfloat16, enabled=enabled):
        logits = model(batch["tokens"], batch["segments"], batch["masked"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
