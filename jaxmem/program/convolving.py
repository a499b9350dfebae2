"""What a GPU's convolution takes beside its products."""

from __future__ import annotations

import math

# With fewer channels than this, kernels for few channels take the taps together with them; one
# channel alone is multiplied without tensor cores, and no quicker than many.
_FEW = range(2, 16)
# What the gradient of a kernel takes for a place and a tap, over what a convolution does, which
# writes as much as it reads: 12.0 and 14.4 ps.
SUMMED = 12.0 / 14.4


def steps_beside(eqn) -> float:
    """How often a convolution loads what it multiplies: once for each place and tap.

    A convolution is a product of ``[places, taps x channels]`` with ``[taps x channels, channels]``
    (implicit GEMM: Chetlur et al. 2014, "cuDNN"), the gradient of its kernel one of
    ``[taps x channels, places]`` with ``[places, channels]``. Of kernels of 3 x 3 on an H200 in
    bfloat16 on 256 x 512 x 512 places, those of 24 channels take 9.4 to 9.8 ms forward and backward
    to what was given and those of 1 channel 8.7 to 9.2; the gradients of their kernels take 8.3 and
    7.2. So it is 14.4 and 12.0 ps for each place and tap, and the products at the rate of large
    ones. 48 channels on an eighth of the places take 1.4 to 1.6 ms, 96 on an eighth of those 0.32
    and 192 again 0.14; 64 channels of float32 on 256 x 56 x 56 places 0.26.
    Grouped convolutions have kernels of their own, of which nothing is known.
    """
    numbers = eqn.params["dimension_numbers"]
    given, kernel = (v.aval.shape for v in eqn.invars)
    out = eqn.outvars[0].aval.shape
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    if groups > 1 or not math.prod(kernel) or not math.prod(given):
        return 0.0
    taps = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
    places = math.prod(out[d] for d in numbers.out_spec[2:])
    if sums_over_places(eqn):  # Its taps are the places, its batch the channels that are read.
        channels, examples = given[numbers.lhs_spec[0]], kernel[numbers.rhs_spec[1]]
        found, wide = examples * taps * places, places
    else:
        channels, examples = kernel[numbers.rhs_spec[1]], out[numbers.out_spec[0]]
        found, wide = examples * places * taps, taps
    holes = math.prod(eqn.params["lhs_dilation"])
    return found / holes / (wide if channels in _FEW else 1)


def sums_over_places(eqn) -> bool:
    """Whether a convolution is the gradient of a kernel: what was the batch is its channels."""
    numbers = eqn.params["dimension_numbers"]
    return numbers.lhs_spec[1] == 0 and numbers.rhs_spec[1] == 0
