"""How a train step in PyTorch is run: eager, compiled, checkpointed, saved on the host."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo.config
import torch._functorch.config
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.timing import timed

WAYS = ("eager", "compile", "checkpoint", "compile + checkpoint", "save_on_cpu", "cpu optimizer")


def run(net: str, size: str, way: str, share: float | None, samples: int) -> dict:
    """Run one way and say what it took.

    Args:
        net: a module of ``workloads``, without its ``_torch``.
        size: one of its ``SIZES``.
        way: one of :data:`WAYS`.
        share: ``activation_memory_budget`` of ``"compile"``.
        samples: how many samples of steps are timed.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = importlib.import_module(f"benchmarks.workloads.{net}_torch")
    torch.manual_seed(0)
    started = time.perf_counter()
    work = module.workload(module.SIZES[size], device)
    on_host = way == "cpu optimizer"
    parameters = list(work.model.parameters())
    optimizer = OnHost(work.optimizer, parameters) if on_host else work.optimizer(parameters)
    _wrap(work.blocks, way, share)

    def saving() -> Any:
        if way == "save_on_cpu":
            return save_on_cpu(pin_memory=device == "cuda")
        return contextlib.nullcontext()

    def step() -> torch.Tensor:
        with saving():
            loss = work.loss(work.model, work.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    first = step()  # compiles
    _wait(device)
    prepared = time.perf_counter() - started
    middle, losses = timed(step, lambda: _wait(device), samples)
    return {
        "prepare_seconds": prepared,
        "seconds": middle,
        "losses": [float(first), *losses],
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "items_per_second": work.items / middle,
    }


class OnHost:
    """An optimizer whose state and whose step are on the CPU, as ZeRO-Offload has it.

    Gradients are copied into pinned memory, parameters are updated there and copied back.
    """

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], parameters: list[Any]):
        self.there = parameters
        pinned = torch.cuda.is_available()
        self.here = [_on_cpu(p, pinned).requires_grad_() for p in parameters]
        for here in self.here:
            here.grad = _on_cpu(torch.zeros_like(here), pinned)
        self.optimizer = make(self.here)

    @torch.no_grad()
    def step(self) -> None:
        for there, here in zip(self.there, self.here, strict=True):
            here.grad.copy_(there.grad, non_blocking=True)
        _wait(self.there[0].device.type)
        self.optimizer.step()
        for there, here in zip(self.there, self.here, strict=True):
            there.copy_(here, non_blocking=True)

    def zero_grad(self, set_to_none: bool) -> None:
        for there in self.there:
            there.grad = None if set_to_none else torch.zeros_like(there)


def _on_cpu(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
    copy = tensor.detach().to("cpu", copy=True)
    return copy.pin_memory() if pinned else copy


def _wrap(blocks: list[Any], way: str, share: float | None) -> None:
    """Compile or checkpoint every block."""
    if way.startswith("compile"):
        if share is not None:
            torch._functorch.config.activation_memory_budget = share
        # All blocks are one piece of code; where there are more of them it would give up silently.
        torch._dynamo.config.recompile_limit = 4 * len(blocks)
        torch._dynamo.config.accumulated_recompile_limit = 8 * len(blocks)
        for block in blocks:
            block.forward = torch.compile(block.forward)
    if "checkpoint" in way:
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
