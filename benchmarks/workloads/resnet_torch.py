"""The ResNet of ``benchmarks/workloads/resnet.py`` in PyTorch, channels last."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.workloads.base import TorchWorkload
from benchmarks.workloads.conv_sizes import RESNET_SIZES as SIZES
from benchmarks.workloads.conv_sizes import ResNetSizes as Sizes

__all__ = ["SIZES", "Sizes", "workload"]


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3 and 1x1 added to a shortcut (v1.5: the 3x3 has the stride)."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width
        self.conv1 = _conv(inputs, width, 1, 1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, outputs, 1, 1)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                _conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images ``[batch, 3, height, width]`` to logits ``[batch, classes]``."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.stem = _conv(3, sizes.width, 7, 2)
        self.stem_norm = nn.BatchNorm2d(sizes.width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.relu = nn.ReLU(inplace=True)
        blocks, channels = [], sizes.width
        for stage, depth in enumerate(sizes.depths):
            width = sizes.width * 2**stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, sizes.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.stem_norm(self.stem(images))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def workload(sizes: Sizes, device: torch.device | str) -> TorchWorkload:
    """The net, its loss and a fixed batch on ``device``; float32, with products in TF32.

    Sets PyTorch's global switches for that, and lets cuDNN time its algorithms.
    """
    device = torch.device(device)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    with device:
        model = ResNet(sizes).to(memory_format=torch.channels_last)
        images = torch.randn(sizes.batch, 3, sizes.image, sizes.image)
        batch = {
            "images": images.to(memory_format=torch.channels_last),
            "labels": torch.randint(sizes.classes, (sizes.batch,)),
        }

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch["images"]), batch["labels"])

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=sizes.learning_rate,
            momentum=sizes.momentum,
            weight_decay=sizes.weight_decay,
            fused=device.type == "cuda",
        )

    return TorchWorkload(
        model=model,
        blocks=list(model.blocks),
        loss=loss,
        batch=batch,
        optimizer=optimizer,
        items=sizes.batch,
    )


def _conv(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
