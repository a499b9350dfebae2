"""The train steps that every transform is tested on, and how their results are compared.

``PROBLEMS`` are small enough to run on a CPU and hold several times more activations than
arguments; ``LARGE`` are abstract and only ever compiled. ``random_step`` draws fuzz programs.
"""

from . import experts, flow, images, libraries, recurrent, rules, transformers
from .compare import assert_no_less_exact, assert_same, error_vs_float64, in_float64
from .large import LARGE
from .problem import Problem, PureStep, pure
from .programs import random_step

_FAMILIES = (transformers, images, recurrent, experts, rules, flow, libraries)
PROBLEMS: dict[str, Problem] = {p.name: p for family in _FAMILIES for p in family.PROBLEMS}

__all__ = [
    "LARGE",
    "PROBLEMS",
    "Problem",
    "PureStep",
    "assert_no_less_exact",
    "assert_same",
    "error_vs_float64",
    "in_float64",
    "pure",
    "random_step",
]
