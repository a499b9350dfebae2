"""Targets by name: spelling, counts, figures, errors, and being plain values."""

import copy
import dataclasses
import pickle

import pytest

from jaxmem.errors import ArgumentError, TargetError, UnknownTargetError
from jaxmem.targets import Target, table

ISSUE_LIST = (
    "v100-32 t4 a10 a100-40 a100-80 l4 l40s rtx3090 rtx4090 rtx5090 h100-pcie h100 h200 b200 "
    "rtx-pro-6000"
).split()


@pytest.mark.parametrize(
    ("asked", "name", "hosts", "devices"),
    [
        ("h200", "h200", 1, 1),
        ("H200", "h200", 1, 1),
        ("  NVIDIA H200 ", "h200", 1, 1),
        ("8xh100", "8xh100", 1, 8),
        ("8 x H100-SXM", "8xh100", 1, 8),
        ("4x8xh100", "4x8xh100", 4, 8),
        ("1xh100", "h100", 1, 1),
        ("1x8xh100", "8xh100", 1, 8),
        ("2x1xh100", "2x1xh100", 2, 1),
        ("h100-80", "h100", 1, 1),
        ("h100_pcie", "h100-pcie", 1, 1),
        ("4xa100-80", "4xa100-80", 1, 4),
        ("a100", "a100-80", 1, 1),
        ("A100 40GB", "a100-40", 1, 1),
        ("v100", "v100-32", 1, 1),
        ("RTX 4090", "rtx4090", 1, 1),
        ("GeForce RTX 5090", "rtx5090", 1, 1),
        ("2xrtx-3090", "2xrtx3090", 1, 2),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000", 1, 1),
    ],
)
def test_names_are_read_as_people_write_them(asked, name, hosts, devices):
    target = Target(asked)
    assert (target.name, target.hosts, target.devices_per_host) == (name, hosts, devices)
    assert target.device_count == hosts * devices
    assert Target(target.name) == target


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("h10", r"no target is called 'h10'\. Nearest: .*h100.*\. Known: cpu, v100-32, t4"),
        ("8xh3000", r"no target is called '8xh3000'\. Nearest: "),
        ("tpu-v5p", r"no target is called 'tpu-v5p'.*Target\.local\(\) is this machine"),
        ("", r"no target is called ''\. Known: "),
        (
            "0xh100",
            r"'0xh100' asks for no device\. Use a count of at least one, such as \"8xh100\"",
        ),
        ("0x8xh100", r"asks for no device"),
        ("-8xh100", r"no target is called '-8xh100'"),
        ("2x4x8xh100", r"no target is called '2x4x8xh100'"),
    ],
)
def test_unknown_names_get_the_nearest_and_the_list(asked, message):
    with pytest.raises(UnknownTargetError, match=message):
        Target(asked)


def test_a_name_that_is_not_text_says_so():
    with pytest.raises(ArgumentError, match=r"a target name is text such as .*, not 8"):
        Target(8)
    with pytest.raises(ArgumentError, match="target must be a Target, a name or None, not float"):
        Target.resolve(1.5)
    with pytest.raises(ArgumentError, match="Target has no field 'hbm'; its fields are name"):
        Target("h200", hbm=3)


def test_targets_are_values():
    target = Target("4x8xh100")
    assert target == Target("4X8xH100-SXM") and hash(target) == hash(Target("4x8xh100"))
    assert target != Target("8xh100")
    assert {target: 1}[pickle.loads(pickle.dumps(target))] == 1
    assert copy.deepcopy(target) == target
    assert dataclasses.replace(target, hosts=2).hosts == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.hosts = 2


def test_given_fields_replace_those_of_the_table():
    slow = Target("h100", h2d_bytes_per_second=20e9, flops={"float32": 1e12})
    assert slow.h2d_bytes_per_second == 20e9 and slow.flops == {"float32": 1e12}
    assert slow.device_bytes == Target("h100").device_bytes
    assert slow != Target("h100")


@pytest.mark.parametrize(
    "given",
    [
        {"duplex_bytes_per_second": 0},
        {"h2d_bytes_per_second": -1.0},
        {"hbm_bytes_per_second": float("nan")},
        {"d2d_bytes_per_second": "fast"},
        {"flops": {"bfloat16": 0.0, "float32": 1e12}},
        {"flops": {"bfloat16": 1e12}},
        {"flops": {"float32": None}},
        {"flops": 5},
        {"device_bytes": 0},
        {"hosts": 0},
        {"hosts": True},
        {"devices_per_host": 1.5},
    ],
)
def test_what_no_machine_has_is_refused(given):
    (name,) = given
    with pytest.raises(ArgumentError, match=rf"{name}.* of a target"):
        Target("h200", **given)


def test_a_target_may_have_no_way_to_the_host():
    assert Target("h200", d2h_bytes_per_second=0.0).d2h_bytes_per_second == 0


def test_resolve_takes_a_target_a_name_or_nothing():
    target = Target("l4")
    assert Target.resolve(target) is target
    assert Target.resolve("l4") == target
    assert Target.resolve(None) == Target.local()


def test_rates_answer_for_every_dtype():
    h200, t4, a100 = Target("h200"), Target("t4"), Target("a100")
    assert h200.flops_per_second("float8_e4m3fn") == h200.flops["float8"] == 1978.9e12
    assert a100.flops_per_second("float8_e5m2") == a100.flops["bfloat16"]
    assert h200.flops_per_second("uint8") == h200.flops["int8"]
    assert h200.flops_per_second("complex64") == h200.flops["float32"]
    assert t4.flops["float16"] > 5 * t4.flops["float32"]
    with pytest.raises(KeyError, match="float8"):
        _ = a100.flops["float8"]


def test_showing():
    assert str(Target("8xh200")) == "8xh200 (133.9GiB usable each)"
    html = Target("h200")._repr_html_()
    assert "133.9GiB" in html and "989.4" in html and "datasheet" in html
    assert "<b>" not in dataclasses.replace(Target("h200"), name="<b>")._repr_html_()


def test_the_table_has_what_the_issue_lists_in_a_sane_order_of_size():
    assert table.models() == tuple(ISSUE_LIST)
    sizes = {name: Target(name).device_bytes / 2**30 for name in ISSUE_LIST}
    nominal = dict(
        zip(ISSUE_LIST, [32, 16, 24, 40, 80, 24, 48, 24, 24, 32, 80, 80, 141, 180, 96], strict=True)
    )
    for name, gigabytes in nominal.items():
        assert 0.84 * gigabytes < sizes[name] < gigabytes, name


@pytest.mark.parametrize("model", ISSUE_LIST)
def test_every_entry_says_where_its_figures_are_from(model):
    entry, target = table.gpu(model), Target(model)
    assert entry["source"] and all(len(source) > 10 for source in entry["source"])
    assert entry["confirmed"] is (not entry["unconfirmed"])
    for field in entry["unconfirmed"]:
        top, _, key = field.partition(".")
        assert top in entry and (not key or key in entry[top])
        assert field in " ".join(target.sources)
    assert any("assumed" in s for s in target.sources)


@pytest.mark.parametrize("model", ISSUE_LIST)
def test_every_entry_is_consistent_with_its_multiprocessors(model):
    entry = table.gpu(model)
    limits = table.sm_limits(entry["compiled_as"])
    vector = 2 * entry["sm_count"] * limits["fpus_per_sm"] * entry["clock_ghz"] * 1e9
    # Tensor cores are 1 to 16 times the vector units in float32 (TF32), 1 to 64 in 16 bits.
    assert 0.9 * vector < entry["flops"]["float32"] < 17 * vector
    assert entry["flops"]["float32"] <= entry["flops"]["float16"] < 64 * vector
    assert limits["shared_bytes_per_block_optin"] <= limits["shared_bytes_per_sm"]
    assert 100e9 < entry["memory_bytes_per_second"] < 10e12


def test_spellings_are_unambiguous():
    seen = {}
    for model in table.models():
        entry = table.gpu(model)
        for name in {table._spelling(n) for n in (model, *entry["aliases"])}:
            assert seen.setdefault(name, model) == model


def test_a_gpu_compiled_as_another_capability_says_so():
    assert "compiled as compute capability 7.5: CUDA 13 has no 7.0" in Target("v100").sources
    assert issubclass(UnknownTargetError, TargetError)
