"""Random policies and values, from few enough names that rules meet values."""

from __future__ import annotations

from hypothesis import strategies as st

from jaxmem import policies
from jaxmem.policies import Facts, Policy

NAMES = ("attn", "attn_out", "mlp", "logits")
MODULES = ("", "Net", "Net/Block_0", "Net/Block_1/mlp", "Net/Block_0/mlp/Dense_0")
PRIMITIVES = ("dot_general", "conv_general_dilated", "tanh", "exp")
DTYPES = ("float32", "bfloat16", "int32")

facts = st.builds(
    Facts,
    names=st.lists(st.sampled_from(NAMES), max_size=2, unique=True).map(tuple),
    module=st.sampled_from(MODULES),
    primitive=st.sampled_from(PRIMITIVES),
    dtype=st.sampled_from(DTYPES),
    nbytes=st.integers(0, 6),
    flops=st.integers(0, 20).map(float),
    moved_bytes=st.integers(0, 4),
    batch_dims=st.sampled_from([None, 0, 1]),
)

_globs = st.sampled_from([*NAMES, "attn*", "*", "m?p", "[al]*"])


@st.composite
def fields(draw: st.DrawFn) -> tuple[tuple[str, ...], dict]:
    """Names and keywords of a rule, at least one of them."""
    low, high = sorted([draw(st.integers(1, 6)), draw(st.integers(1, 6))])
    less, more = sorted([draw(st.floats(0, 20)), draw(st.floats(0, 20))])
    optional = {
        "module": st.sampled_from(["Net", "Block_*", "Block_*/mlp", "mlp"]),
        "primitive": st.sampled_from([*PRIMITIVES, ("tanh", "exp")]),
        "dtype": st.sampled_from([*DTYPES, ("bfloat16", "int32")]),
        "min_bytes": st.just(low),
        "max_bytes": st.just(high),
        "min_flops_per_byte": st.just(less),
        "max_flops_per_byte": st.just(more),
        "batch_dims": st.integers(0, 1),
    }
    chosen = draw(st.lists(st.sampled_from(["names", *optional]), min_size=1, max_size=3))
    names = draw(st.lists(_globs, min_size=1, max_size=2)) if "names" in chosen else []
    given = {key: draw(optional[key]) for key in dict.fromkeys(chosen) if key != "names"}
    return tuple(names), given


@st.composite
def single_rules(draw: st.DrawFn) -> Policy:
    """``save(...)``, ``recompute(...)`` or ``offload(...)``."""
    names, given = draw(fields())
    make = draw(st.sampled_from([policies.save, policies.recompute, policies.offload]))
    return make(*names, **given)


constants = st.sampled_from(
    [
        policies.nothing,
        policies.everything,
        policies.dots,
        ~policies.dots,
        policies.dots_with_no_batch_dims,
    ]
)


def _exceptions(base: st.SearchStrategy[Policy]) -> st.SearchStrategy[Policy]:
    return st.builds(lambda p, rules: overridden(p, rules), base, rule_lists)


rule_lists = st.lists(single_rules(), min_size=1, max_size=3)


def overridden(policy: Policy, rules: list[Policy]) -> Policy:
    """``policy`` with exceptions made one after the other, so that none contradict."""
    for rule in rules:
        policy = policy.override(rule)
    return policy


any_policy = st.recursive(
    single_rules() | constants,
    lambda inner: (
        st.builds(lambda a, b: a | b, inner, inner)
        | st.builds(lambda a, b: a & b, inner, inner)
        | st.builds(lambda a: ~a, inner)
        | _exceptions(inner)
    ),
    max_leaves=5,
)
