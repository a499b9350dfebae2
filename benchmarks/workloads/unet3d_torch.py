"""The 3D U-Net of ``benchmarks/workloads/unet3d.py`` in PyTorch, channels last."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.workloads.base import TorchWorkload
from benchmarks.workloads.conv_sizes import UNET3D_SIZES as SIZES
from benchmarks.workloads.conv_sizes import UNet3DSizes as Sizes

__all__ = ["SIZES", "Sizes", "workload"]


class GroupNorm(nn.GroupNorm):
    """Group norm that reads and writes the dtype of its input; its sums are float32 inside.

    Autocast would make it, and what is kept after it, float32; JAX's has the computation's dtype.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return functional.group_norm(x, self.num_groups, weight, bias, self.eps)


class Down(nn.Module):
    """Two convolutions, the first one with the stride."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int):
        super().__init__()
        self.conv1 = _conv(inputs, outputs, stride)
        self.norm1 = GroupNorm(groups, outputs)
        self.conv2 = _conv(outputs, outputs, 1)
        self.norm2 = GroupNorm(groups, outputs)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(x)))


class Up(nn.Module):
    """Two convolutions of ``x`` concatenated with ``skip``, the first as the sum of two."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.conv1 = _conv(channels, channels, 1)
        self.conv1_skip = _conv(channels, channels, 1)
        self.norm1 = GroupNorm(groups, channels)
        self.conv2 = _conv(channels, channels, 1)
        self.norm2 = GroupNorm(groups, channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm1(self.conv1(x) + self.conv1_skip(skip)))
        return self.relu(self.norm2(self.conv2(x)))


class UNet3D(nn.Module):
    """Volumes ``[batch, inputs, depth, height, width]`` to logits, ``classes`` in their place."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        downs, inputs = [], sizes.inputs
        for level, outputs in enumerate(sizes.channels):
            downs.append(Down(inputs, outputs, 1 if level == 0 else 2, sizes.groups))
            inputs = outputs
        self.downs = nn.ModuleList(downs)
        finer_first = list(zip(sizes.channels[1:], sizes.channels[:-1], strict=True))
        self.upsamples = nn.ModuleList(
            nn.ConvTranspose3d(coarse, fine, 2, stride=2, bias=False)
            for coarse, fine in reversed(finer_first)
        )
        self.ups = nn.ModuleList(Up(fine, sizes.groups) for _, fine in reversed(finer_first))
        self.head = nn.Conv3d(sizes.channels[0], sizes.classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
        skips.pop()
        for upsample, up in zip(self.upsamples, self.ups, strict=True):
            x = up(upsample(x), skips.pop())
        return self.head(x)


def workload(sizes: Sizes, device: torch.device | str) -> TorchWorkload:
    """The net, its loss and a fixed batch on ``device``; autocast to bfloat16 inside the loss.

    Lets cuDNN time its algorithms, globally.
    """
    device = torch.device(device)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    with device:
        model = UNet3D(sizes).to(memory_format=torch.channels_last_3d)
        volumes = torch.randn(sizes.batch, sizes.inputs, *sizes.volume)
        batch = {
            "volumes": volumes.to(memory_format=torch.channels_last_3d),
            "labels": torch.randint(sizes.classes, (sizes.batch, *sizes.volume)),
        }

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return functional.cross_entropy(model(batch["volumes"]), batch["labels"])

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters,
            lr=sizes.learning_rate,
            weight_decay=sizes.weight_decay,
            fused=device.type == "cuda",
        )

    return TorchWorkload(
        model=model,
        blocks=[*model.downs, *model.ups],
        loss=loss,
        batch=batch,
        optimizer=optimizer,
        items=sizes.batch,
    )


def _conv(inputs: int, outputs: int, stride: int) -> nn.Conv3d:
    return nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
