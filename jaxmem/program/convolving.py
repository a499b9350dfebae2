"""What a GPU's convolution takes beside its products."""

from __future__ import annotations

import math

# With fewer channels than this, kernels for few channels take the taps together with them; one
# channel alone is multiplied without tensor cores, and no quicker than many.
_FEW = range(2, 16)


def steps_beside(eqn) -> float:
    """How often a convolution loads what it multiplies: once for each place and tap.

    A convolution is a product of ``[places, taps x channels]`` with ``[taps x channels, channels]``
    (implicit GEMM: Chetlur et al. 2014, "cuDNN"), the gradient of its kernel one of
    ``[taps x channels, places]`` with ``[places, channels]``. Of kernels of 3 x 3 on an H200 in
    bfloat16, 24 channels on 256 x 512 x 512 places take 9.7 ms, 48 on an eighth of them 1.4 to 1.6,
    96 on an eighth of those 0.32 and 192 again 0.14: 13 ps for each place and tap, and the products
    at the rate of large ones. It is 0.26 ms for 64 channels of float32 on 256 x 56 x 56 places.
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
