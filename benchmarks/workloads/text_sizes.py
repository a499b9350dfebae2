"""The sizes of GPT and BERT, the same for JAX and PyTorch; nothing here imports either of them.

All are trained with AdamW on float32 parameters and compute in ``dtype``. The batches are those
whose step fits one H200 as written, with nothing recomputed and flash attention; ``"tiny"`` is for
tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdamW:
    """What AdamW is called with."""

    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class GPTSizes:
    """A GPT without biases, its output head tied to the embedding of tokens.

    Attributes:
        layers: number of blocks; ``heads``, ``d_model`` are of each.
        sequence: tokens of a sequence; one more is read, to predict the last.
        batch: sequences of a step.
        dtype: dtype of the computation.
    """

    layers: int
    d_model: int
    heads: int
    batch: int
    sequence: int = 2048
    vocab_size: int = 50304
    dtype: str = "bfloat16"
    adamw: AdamW = AdamW()

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        weights = self.layers * 12 * self.d_model**2
        embeddings = (self.vocab_size + self.sequence) * self.d_model
        norms = (2 * self.layers + 1) * self.d_model
        return weights + embeddings + norms


@dataclass(frozen=True)
class BertSizes:
    """A BERT with its masked-language-model head, tied to the embedding of tokens; no pooler.

    Attributes:
        layers: number of blocks; ``heads``, ``d_model`` are of each.
        sequence: tokens of a sequence, all of them real; ``masked`` of them are to be predicted.
        batch: sequences of a step.
        mask_token: what is read in place of a token that is to be predicted.
        dtype: dtype of the computation.
    """

    layers: int
    d_model: int
    heads: int
    batch: int
    sequence: int = 512
    masked: int = 76
    vocab_size: int = 30522
    segments: int = 2
    mask_token: int = 103
    dtype: str = "bfloat16"
    adamw: AdamW = AdamW(learning_rate=1e-4, b2=0.999, weight_decay=0.01)

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        d_model = self.d_model
        norm = 2 * d_model
        # Four square matrices of attention, two of the MLP that are four times as large.
        block = 12 * d_model**2 + (4 + 4 + 1) * d_model + 2 * norm
        embeddings = (self.vocab_size + self.sequence + self.segments) * d_model + norm
        head = d_model**2 + d_model + norm + self.vocab_size
        return self.layers * block + embeddings + head


GPT_SIZES = {
    "350m": GPTSizes(layers=24, d_model=1024, heads=16, batch=32),
    "1.3b": GPTSizes(layers=24, d_model=2048, heads=16, batch=16),
    "7b": GPTSizes(layers=32, d_model=4096, heads=32, batch=2),
    "tiny": GPTSizes(
        layers=2,
        d_model=32,
        heads=2,
        batch=16,
        sequence=16,
        vocab_size=64,
        dtype="float32",
        adamw=AdamW(learning_rate=1e-2),
    ),
}
BERT_SIZES = {
    "large": BertSizes(layers=24, d_model=1024, heads=16, batch=32),
    "tiny": BertSizes(
        layers=2,
        d_model=32,
        heads=2,
        batch=16,
        sequence=16,
        masked=2,
        vocab_size=64,
        mask_token=3,
        dtype="float32",
        adamw=AdamW(learning_rate=1e-2),
    ),
}
