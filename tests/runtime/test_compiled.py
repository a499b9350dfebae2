"""Reports of compiled programs: the compiler's figure, every byte of it, and its origin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.errors import ReportError
from jaxmem.hlo.assignment import parse_assignment
from jaxmem.hlo.lifetimes import lives
from jaxmem.hlo.module import read_module
from jaxmem.hlo.schedule import body_of, scheduled
from jaxmem.hlo.serialized import buffer_assignment
from jaxmem.planner.report import MemoryReport
from jaxmem.runtime.compiled import compiled_report
from jaxmem.runtime.known import known_of
from jaxmem.targets.compiling import compile_for
from jaxmem.targets.topology import devices
from tests.problems import PROBLEMS, pure

ON = [("cpu", "conv_linen"), ("cpu", "branches"), ("cpu", "mixed_leaves"), ("h100", "lstm")]
# JAX lowers a callback only for a GPU that is there; what jaxmem compiles has a stand-in for it.
NOT_ABSENT = ("effects",)
ALL = [("cpu", name) for name in PROBLEMS]
ALL += [("h100", name) for name in PROBLEMS if name not in NOT_ABSENT]


def compiled(target: str, name: str) -> jax.stages.Compiled:
    problem = pure(PROBLEMS[name])
    made = compile_for(target, problem.function, problem.args, donate=problem.donate)
    return made.executable


@pytest.fixture(scope="module", params=ON, ids="-".join)
def executable(request) -> jax.stages.Compiled:
    return compiled(*request.param)


def check(report: MemoryReport) -> None:
    assert report.source == "compiled"
    assert report.peak_bytes == report.compiled_bytes == max(report.timeline)
    assert sum(b.nbytes for b in report.at_peak()) == report.peak_bytes
    assert report.attributed_bytes >= 0.95 * report.peak_bytes
    assert report.by_category().get("fragmentation", 0) <= 0.05 * report.peak_bytes


def test_the_peak_is_the_compilers_and_has_names(executable):
    check(compiled_report(executable))


@pytest.mark.slow
@pytest.mark.parametrize(("target", "name"), [pair for pair in ALL if pair not in ON])
def test_the_peak_is_the_compilers_and_has_names_for_all(target: str, name: str):
    check(compiled_report(compiled(target, name)))


def test_no_two_things_are_in_the_same_bytes_at_the_same_time(executable):
    """What the compiler put in the same place can then not be live together by mistake."""
    schedule = scheduled(read_module(executable))
    for allocation in parse_assignment(buffer_assignment(executable)):
        if allocation.parameter >= 0 or allocation.is_output:
            continue
        found = lives(schedule, allocation)
        for n, one in enumerate(found):
            assert 0 <= one.start <= one.end <= schedule.end
            assert 0 <= one.offset <= one.offset + one.nbytes <= allocation.nbytes
            for other in found[:n]:
                together = one.start <= other.end and other.start <= one.end
                ends = one.offset + one.nbytes, other.offset + other.nbytes
                assert not (together and one.offset < ends[1] and other.offset < ends[0])


def test_a_loop_without_a_body_is_unreadable_and_not_guessed_at(monkeypatch):
    turned = jax.jit(lambda x: jax.lax.fori_loop(0, 9, lambda _, y: jnp.sin(y @ y), x))
    executable = turned.lower(jnp.ones((8, 8))).compile()
    module = read_module(executable)
    (loop,) = [one for one in module.instructions.values() if one.opcode == "while"]
    condition, body = sorted(loop.called, key=lambda c: module.root(c).shape.nbytes)
    assert body_of(module, loop) == body
    # Its type may be another one in how it is laid out.
    loop.raw_shape += b"\x00" * 2
    assert body_of(module, loop) == body
    loop.called = [condition]
    monkeypatch.setattr("jaxmem.runtime.compiled.read_module", lambda _: module)
    with pytest.raises(ReportError, match=f"the loop {loop.name} runs nothing"):
        compiled_report(executable)


def test_the_timeline_is_what_the_buffers_add_up_to(executable):
    report = compiled_report(executable)
    counted = [b for b in report.buffers if b.memory == "device"]
    for index in range(0, len(report.timeline), 7):
        live = sum(b.nbytes for b in counted if b.start <= index <= b.end)
        assert live == report.timeline[index]


def test_what_a_loop_stacks_is_named_by_the_line_that_makes_it():
    jax.clear_caches()  # JAX names the line that first traced a function of jnp in these shapes.

    def step(w, x):
        def layer(x, w):
            with jax.named_scope("layer"):
                return jnp.tanh(x @ w), None

        return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)

    args = jnp.ones((6, 64, 64)), jnp.ones((256, 64))
    report = jaxmem.analyze(step, *args, target="h100")
    stacked = [b for b in report.buffers if b.shape == (6, 256, 64)]
    assert stacked
    line = step.__code__.co_firstlineno + 3
    assert {b.category for b in stacked} == {"residual"}
    assert any(b.source.startswith(f"test_compiled.py:{line} ") for b in stacked)
    assert all(b.source.startswith("test_compiled.py:") for b in stacked), stacked
    assert not any(b.path for b in stacked)
    assert {b.module for b in stacked if f":{line} " in b.source} == {"layer"}
    inside = {b.repeats for b in report.buffers if b.category == "temporary"}
    assert inside <= {1, 6}
    assert [name for name, _ in report.phases][:2] == ["forward", "backward"]


def test_any_compiled_function_can_be_asked():
    def step(params, x):
        return jnp.sin(x @ params["w"]) @ params["w"].T

    args = {"w": jnp.ones((64, 32)), "unused": jnp.ones(3)}, jnp.ones((16, 64))
    report = compiled_report(jax.jit(step).lower(*args).compile())
    assert report.function == "step"
    assert report.by_argument() == {"params['w']": 8192, "x": 4096}
    check(report)


@pytest.mark.parametrize(
    ("step", "args"),
    [
        (lambda: (), ()),
        (lambda x: x, (jnp.ones(4),)),
        (lambda x: x + 1, (jnp.ones(4),)),
        (lambda: jnp.ones(3), ()),
        (lambda x: x, (jnp.ones((0, 4)),)),
    ],
    ids=["empty", "identity", "one", "constant", "no numbers"],
)
def test_programs_of_nothing_have_reports(step, args):
    report = jaxmem.analyze(step, *args)
    assert report.peak_bytes == report.compiled_bytes == max(report.timeline)
    assert sum(b.nbytes for b in report.at_peak()) == report.peak_bytes
    assert MemoryReport.from_json(report.to_json()) == report
    assert str(report)
    assert str(report.fusions())
    assert report._repr_html_()


def test_copies_of_arguments_say_of_which():
    def step(state, x):
        return jax.lax.scan(lambda s, row: (s * 0.5 + row.sum(), s[0]), state, x)

    report = jaxmem.analyze(step, jnp.ones(100_000), jnp.ones((8, 10)))
    names = {b.name for b in report.at_peak() if b.nbytes == 400_000}
    assert "state" in names
    assert report.attributed_bytes >= 0.95 * report.peak_bytes


def test_host_memory_is_apart():
    def step(w, x):
        def layer(x, w):
            return jnp.tanh(checkpoint_name(x, "input") @ w), None

        away = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["input"],
            offload_src="device",
            offload_dst="pinned_host",
        )
        layer = jax.checkpoint(layer, policy=away)
        return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)

    made = compile_for("h100", step, [jnp.ones((6, 64, 64)), jnp.ones((256, 64))])
    report = compiled_report(made.executable)
    assert report.host_bytes == made.memory.host_temp_bytes >= 6 * 256 * 64 * 4
    check(report)
    assert all(b.memory == "device" for b in report.at_peak())


def test_on_a_mesh_bytes_are_those_of_each_device():
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(devices(jaxmem.Target("8xh100")), ("d",))
    split = NamedSharding(mesh, PartitionSpec("d"))
    w = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=split)
    step = jax.jit(lambda w, x: jnp.sin(w @ x) @ x, out_shardings=split)
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    report = compiled_report(step.lower(w, x).compile())
    assert report.by_argument() == {"x": 4 * 256**2, "w": 4 * 512 * 256 // 8}
    assert report.peak_bytes == report.compiled_bytes
    assert sum(b.nbytes for b in report.at_peak()) == report.peak_bytes


class Silent:
    """An executable that tells nothing, as of a jaxlib that is not known."""

    def memory_analysis(self):
        return None

    def runtime_executable(self):
        return self

    def serialize(self):
        return b"something else"


def test_a_jaxlib_that_tells_nothing_is_named():
    with pytest.raises(ReportError, match=r"jaxlib .* does not tell the compiler's buffers"):
        compiled_report(Silent())  # pyright: ignore[reportArgumentType]


def test_where_nothing_can_be_read_the_report_is_predicted_and_says_so(monkeypatch):
    def refuses(executable):
        raise ReportError("it cannot be read")

    monkeypatch.setattr("jaxmem.runtime.compiled.buffer_assignment", refuses)
    report = jaxmem.analyze(lambda x: jnp.sin(x) @ x, jnp.ones((64, 64)))
    assert report.source == "predicted"
    assert report.notes == ("the buffers are predicted ones: it cannot be read",)
    with pytest.raises(ReportError, match="only compiled ones know"):
        report.fusions()


@pytest.mark.parametrize(
    "told",
    # A field that runs past the end; an allocation with a part of a value that is not there.
    [b"\x1a\x7f", bytes([0x1A, 4, 0x4A, 2, 0x08, 0x63])],
    ids=["no message", "another form"],
)
def test_buffers_in_another_form_are_predicted_and_said_to_be(monkeypatch, told: bytes):
    monkeypatch.setattr("jaxmem.runtime.compiled.buffer_assignment", lambda executable: told)
    report = jaxmem.analyze(lambda x: jnp.sin(x) @ x, jnp.ones((64, 64)))
    assert report.source == "predicted"
    (note,) = report.notes
    assert "does not tell the compiler's buffers in a form that jaxmem reads" in note


def test_known_of_names_all_leaves():
    from jaxmem.program.calling import Caller

    caller = Caller(lambda x, y: (x + y, y), ())
    program = caller.trace(caller.take((jnp.ones(3), jnp.ones(3)), {})).program
    known = known_of(program)
    assert known.arguments == ("x", "y")
    assert len(known.results) == 2
