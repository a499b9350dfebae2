"""What a workload is, for each of the two frameworks; nothing here imports either of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JaxWorkload:
    """A train step in JAX.

    Attributes:
        step: ``step(state, batch) -> (state, loss)``, not jitted; the state is to be donated.
        state: makes a fresh state (parameters, statistics, optimizer state), under jit.
        batch: makes a batch of fixed random numbers, under jit.
        items: how many of ``unit`` one step works on.
        unit: ``"tokens"``, ``"images"`` or ``"volumes"``.
        saved: the checkpoint names a hand-written policy keeps (as MaxText does it, by layer).
        offloaded: the checkpoint names a hand-written policy sends to the host.
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Callable[[], Any]
    batch: Callable[[], Any]
    items: int
    unit: str
    saved: tuple[str, ...]
    offloaded: tuple[str, ...]


@dataclass(frozen=True)
class TorchWorkload:
    """A train step in PyTorch, of the same net with the same shapes and dtypes.

    Attributes:
        model: an ``nn.Module`` on the device, in training mode.
        blocks: its repeated blocks in order: what is compiled or checkpointed one by one. The model
            calls them as modules (``block(x)``), so that their ``forward`` may be replaced.
        loss: ``loss(model, batch) -> scalar``, with autocast inside it where the net uses it.
        batch: tensors on the device, fixed random numbers.
        optimizer: makes the optimizer of parameters, fused where PyTorch has that.
        items: how many of the JAX workload's unit one step works on.
    """

    model: Any
    blocks: list[Any]
    loss: Callable[[Any, Any], Any]
    batch: Any
    optimizer: Callable[[Any], Any]
    items: int
