"""Of equal loop bodies XLA keeps one: recomputations are found under either's names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.planner.search import Search
from jaxmem.program.ir import Hosting
from jaxmem.runtime import verify
from jaxmem.runtime.alike import named_alike
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target
from tests.planner.lines import program
from tests.rewrite.test_transfers import compiled

H200 = Target("h200")
SHAPE = (12, 256, 256)


def net(scale=1.0, act=jnp.tanh, dims=((1,), (0,)), reverse=False):
    """A scanned net that differs in what is given."""

    def layer(y, w):
        return y + scale * act(jax.lax.dot_general(y, w, (dims, ((), ())))), None

    def loss(w, x):
        return jnp.square(jax.lax.scan(layer, x, w, reverse=reverse)[0]).mean()

    return loss


def both(one, other):
    """A step of two nets, each with its own gradient."""

    def step(a, b, x, z):
        return a - jax.grad(one)(a, x), b - jax.grad(other)(b, z)

    return step


def smallest(one, other, shape=SHAPE, rows=2048):
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (SHAPE, shape, (2048, 256), (rows, 256))]
    search = Search(program(both(one, other), *given, donate=(0, 1)), rates_of(H200))
    return search, search.schedule(search.smallest())


def test_what_runs_again_is_found_under_the_names_of_the_equal_loop():
    search, written = smallest(net(), net())
    tags = {tag for tag, _ in verify._recomputed_kernels(written)}
    assert len(tags) == 2
    text = compiled(H200, search.program, written, Hosting()).hlo_text()
    named = tags & verify._kernel_tags(text)
    assert len(named) == 1, "else there is nothing to find"
    assert verify.undone(written, text) == ()
    gone = verify.undone(written, text.replace(named.pop(), "nameless"))
    assert [op.name for op in gone] == ["dot_general", "dot_general"]


DIFFERENT = {
    "a number": (net(), net(scale=2.0)),
    "an operation": (net(), net(act=jnp.sin)),
    "what is summed": (net(), net(dims=((1,), (1,)))),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_loops_that_differ_are_found_by_their_own_names(what):
    search, written = smallest(*DIFFERENT[what])
    tags = {tag for tag, _ in verify._recomputed_kernels(written)}
    assert len(tags) == 2
    alike = named_alike(written)
    assert all(alike[tag] == {tag} for tag in tags)
    text = compiled(H200, search.program, written, Hosting()).hlo_text()
    assert tags <= verify._kernel_tags(text)
    for tag in tags:
        assert len(verify.undone(written, text.replace(tag, "nameless"))) == 1


@pytest.mark.parametrize("other", [{"shape": (9, 256, 256)}, {"rows": 1024}])
def test_what_is_carried_is_part_of_the_form_and_how_often_is_not(other):
    """A body is the same however many turns its loop has; with other shapes it is another."""
    _, written = smallest(net(), net(), **other)
    tags = {tag for tag, _ in verify._recomputed_kernels(written)}
    alike = named_alike(written)
    assert [alike[tag] == tags for tag in tags] == ["shape" in other] * 2


def test_twins_are_planned_without_host_memory():
    """Taken for undone, what is quickest in this budget was given up for copies to the host."""
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (SHAPE, SHAPE, (8192, 256), (8192, 256))]
    plan = jaxmem.plan(
        both(net(), net()),
        *given,
        budget="175MiB",
        target=H200.name,
        donate_argnums=(0, 1),
        progress=False,
    )
    assert plan.recomputed()
    assert not plan.host_bytes
    assert plan.predicted_seconds < 1.3 * plan.keep_all_seconds
    assert all(not r.problem for r in plan.rounds)
