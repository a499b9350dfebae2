"""What kind of work a primitive is: how XLA fuses it, and whether it may run twice."""

from __future__ import annotations

from enum import Enum

from jaxmem.program.collectives import COLLECTIVES
from jaxmem.program.exchange import gathered
from jaxmem.program.ir import Op


class Kind(Enum):
    """How an operation appears in compiled code.

    ALIAS: a new view of its operand; no bytes of its own.
    FUSED: element-wise or data movement that XLA folds into whatever reads it.
    REDUCE: absorbs the element-wise operations before it; its small result is a buffer.
    OPAQUE: a kernel or call of its own; operands and results are buffers.
    """

    ALIAS = "alias"
    FUSED = "fused"
    REDUCE = "reduce"
    OPAQUE = "opaque"


_ALIAS = frozenset(
    "reshape squeeze expand_dims transpose copy copy_p name optimization_barrier "
    "sharding_constraint mesh_cast reduce_precision bitcast_convert_type random_wrap "
    "random_unwrap from_edtype to_edtype stop_gradient pvary pcast layout_constraint".split()
)
# Aliases as a rule; those that are not take the axes of their operand apart.
RESHAPES = frozenset(["expand_dims", "reshape", "squeeze"])

ADDS = frozenset(["add", "add_any"])
CONVOLUTION = "conv_general_dilated"

# Where what they ask for is not what is there, devices send each other their parts.
_CONSTRAINTS = frozenset(["sharding_constraint"])
_REDUCE = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor "
    "argmax argmin reduce".split()
)
_FUSED = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "broadcast_in_dim cbrt ceil clamp clz complex concatenate conj convert_element_type cos "
    "cosh digamma div dynamic_slice empty eq eq_to erf erf_inv erfc exp exp2 expm1 floor full "
    "gather ge gt igamma igammac imag integer_pow iota is_finite le le_to lgamma log log1p log2 "
    "logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or pad polygamma "
    "polynomial population_count pow random_clone random_fold_in random_seed random_split real "
    "regularized_incomplete_beta rem rev round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh slice split sqrt square stack sub tan tanh tile unstack "
    "xor zeros_like zeta".split()
)
# Running these twice would repeat an effect or draw from hidden state; a collective would make
# devices wait for each other a second time.
_STATEFUL = frozenset(
    "infeed outfeed rng_uniform get swap addupdate run_state ref new_ref empty_ref freeze "
    "pure_callback io_callback debug_callback".split()
)


def kind_of(op: Op) -> Kind:
    """The kind of ``op``; anything not known to fuse is opaque."""
    if op.transfer == "fetch":
        return Kind.OPAQUE
    if op.barrier or op.transfer:
        return Kind.ALIAS
    name = op.eqn.primitive.name
    if name in _FUSED:
        return Kind.FUSED
    if name in _CONSTRAINTS and gathered(op):
        return Kind.OPAQUE
    if name in _ALIAS:
        return Kind.ALIAS
    if name in _REDUCE:
        return Kind.REDUCE
    return Kind.OPAQUE


def may_repeat(op: Op) -> bool:
    """Whether ``op`` may be executed again: no effect, no collective, no hidden state."""
    return not op.eqn.effects and not _holds(op.eqn, COLLECTIVES | _STATEFUL)


def _holds(eqn, names: frozenset[str]) -> bool:
    if eqn.primitive.name in names:
        return True
    return any(_holds(inner, names) for jaxpr in inner_jaxprs(eqn) for inner in jaxpr.eqns)


def inner_jaxprs(eqn) -> list:
    """Every jaxpr among the parameters of an equation, closed ones opened."""
    found = []
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found
