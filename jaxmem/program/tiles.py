"""How much more a GPU multiplies than an operation asks for, because tensor cores work on tiles."""

from __future__ import annotations

import math

# Beside the products that are asked for, a kernel takes 13 ps for each place and tap: tiles that
# are partly empty and loads that few channels do not hide. As multiply-adds, at the 735 TFLOP/s
# that products reach on an H200:
_BESIDE = 13e-12 * 735e12 / 2
# With fewer channels than this, kernels for few channels take the taps together with them; one
# channel alone is multiplied without tensor cores, and no quicker than whole tiles are.
_FEW = range(2, 16)


def padding(eqn) -> float:
    """How much longer a convolution takes than its products alone; 1 where nothing is known.

    A convolution is a product of ``[places, taps x channels]`` with ``[taps x channels, channels]``
    (implicit GEMM: Chetlur et al. 2014, "cuDNN"), the gradient of its kernel one of
    ``[taps x channels, places]`` with ``[places, channels]``. Of kernels of 3 x 3 on an H200 in
    bfloat16, 24 channels on 256 x 512 x 512 places take 9.7 ms, 48 on an eighth of them 1.4 to 1.6,
    96 on an eighth of those 0.32 and 192 again 0.14; this makes 8.8, 1.5, 0.36 and 0.13 of them.
    """
    if eqn.primitive.name != "conv_general_dilated":
        return 1.0
    given, kernel = (v.aval.shape for v in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    made, taken = (kernel[d] for d in numbers.rhs_spec[:2])
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    if groups > 1 or not math.prod(kernel) or not math.prod(given):
        return 1.0  # Kernels of their own.
    taps = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
    places = math.prod(eqn.outvars[0].aval.shape[d] for d in numbers.out_spec[2:])
    if sums_over_places(eqn):  # Its taps are the places, and its batch the channels.
        taken, taps = given[numbers.lhs_spec[0]], places
    if taken in _FEW:
        taken *= taps
    return 1.0 + _BESIDE / (taken * made)


def sums_over_places(eqn) -> bool:
    """Whether a convolution is the gradient of a kernel: there are more taps than places."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    numbers = eqn.params["dimension_numbers"]
    kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    taps = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
    return taps > math.prod(out[d] for d in numbers.out_spec[2:])
