"""All numbers of the convolutional workloads; nothing here imports JAX or PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ResNetSizes:
    """A ResNet and its training, all in float32.

    Attributes:
        depths: blocks of each stage.
        width: channels inside the blocks of the first stage.
        classes: number of classes.
        image: height and width of an image.
        batch: images of a step.
        learning_rate: of SGD.
        momentum: of SGD.
        weight_decay: of all parameters, added to their gradients.
    """

    depths: tuple[int, ...]
    width: int
    classes: int
    image: int
    batch: int
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4


@dataclass(frozen=True)
class UNet3DSizes:
    """A 3D U-Net and its training: float32 parameters, computation in bfloat16.

    Attributes:
        channels: channels of each level.
        classes: number of classes of a voxel.
        inputs: channels of a volume.
        groups: groups of channels that are normalised together.
        volume: depth, height and width.
        batch: volumes of a step.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
    """

    channels: tuple[int, ...]
    classes: int
    inputs: int
    groups: int
    volume: tuple[int, int, int]
    batch: int
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2


RESNET_SIZES = {
    "full": ResNetSizes(depths=(3, 8, 36, 3), width=64, classes=1000, image=224, batch=256),
    "tiny": ResNetSizes(depths=(1, 1), width=8, classes=10, image=32, batch=8, learning_rate=0.05),
}

# 24 channels of the full volume are 1.6e9 elements; 32 would be 2^31, too many for cuDNN.
UNET3D_SIZES = {
    "full": UNet3DSizes(
        channels=(24, 48, 96, 192, 384),
        classes=3,
        inputs=1,
        groups=8,
        volume=(512, 512, 256),
        batch=1,
    ),
    "tiny": UNet3DSizes(
        channels=(8, 16), classes=3, inputs=1, groups=4, volume=(16, 16, 8), batch=1
    ),
}
