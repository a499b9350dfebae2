"""How much more a GPU multiplies than an operation asks for, because tensor cores work on tiles."""

from __future__ import annotations

import math

# A tile of cuDNN's convolutions has so many output channels, and takes in so many channels at a
# time (names of its kernels on an H200 say tilesize128x128x32).
_OUT, _IN = 128, 32
# With fewer channels than this, kernels for few channels take the taps together with them.
_FEW = 16


def padding(eqn) -> float:
    """What is multiplied over what is asked for: 1 where tiles are full or nothing is known.

    A convolution is a product of ``[places, taps x channels]`` with ``[taps x channels, channels]``
    (implicit GEMM: Chetlur et al. 2014, "cuDNN"), of tiles of which the last are partly empty. On
    an H200 a bfloat16 one of 256 x 512 x 512 places and 24 channels runs at 9% of the rate of large
    products, one of 128 x 256 x 256 places and 48 channels at 24%.
    """
    if eqn.primitive.name != "conv_general_dilated":
        return 1.0
    kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
    made, taken = (kernel[d] for d in numbers.rhs_spec[:2])
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    if groups > 1 or not math.prod(kernel):
        return 1.0  # Kernels of their own.
    taps = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
    places = math.prod(eqn.outvars[0].aval.shape[d] for d in numbers.out_spec[2:])
    if taken < _FEW or taps > places:
        taken *= taps  # More taps than places: the gradient of a kernel, summed over all places.
    return _filled(made, _OUT) * _filled(taken, _IN)


def _filled(size: float, tile: int) -> float:
    """Places of whole tiles over ``size``."""
    return math.ceil(size / tile) * tile / size
