"""Sizes parse exactly, print briefly, and refuse nonsense by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem import units
from jaxmem.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * 2**30),
        (" 1.5 GB ", 1_500_000_000),
        ("512mib", 512 * 2**20),
        ("2TiB", 2 * 2**40),
        ("3 TB", 3 * 10**12),
        ("7kB", 7000),
        ("7 KiB", 7168),
        ("4096", 4096),
        ("4096 B", 4096),
        (".5GiB", 2**29),
        ("+1.GiB", 2**30),
        ("0.1GB", 100_000_000),
        (4096, 4096),
        (1.5e9, 1_500_000_000),
        (np.int64(77), 77),
    ],
)
def test_parse_bytes_reads_every_documented_form(text, nbytes):
    assert units.parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("lots", "'lots' is not a size"),
        ("", "'' is not a size"),
        ("20 GiB please", "is not a size"),
        ("20G", "G alone could be GiB or GB"),
        ("1e9", "is not a size"),
        ("nan", "'nan' is not a size"),
        ("inf", "'inf' is not a size"),
        ("1" * 5000, "is not a size"),
        ("20GiB\n20GiB", "is not a size"),
        ("0GiB", "'0GiB' is a zero size"),
        ("-3GiB", "'-3GiB' is a negative size"),
        ("0.1B", "'0.1B' is a less than one byte size"),
        (0, "0 is a zero size"),
        (-1, "-1 is a negative size"),
        (True, "True is not a size"),
        (float("nan"), "nan is not a size"),
        (float("inf"), "inf is not a size"),
        ([1], r"\[1\] \(list\) is not a size"),
        (None, r"None \(NoneType\) is not a size"),
        ("80%", "'80%' is not a size"),
    ],
)
def test_parse_bytes_names_what_it_refuses_and_shows_valid_forms(size, message):
    with pytest.raises(BudgetError, match=message) as caught:
        units.parse_bytes(size)
    assert '"20GiB"' in str(caught.value)


def test_budget_is_all_a_share_or_bytes_of_the_device():
    assert units.parse_budget(None, 1000) == 1000
    assert units.parse_budget("80%", 1001) == 800
    assert units.parse_budget("100 %", 1000) == 1000
    assert units.parse_budget("1kB", 1000) == 1000
    assert units.parse_budget(12, 1000) == 12


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("101%", r"budget='101%' .* is more than h200 has: 79.9GiB usable"),
        ("80GiB", r"budget='80GiB' \(80.0GiB\) is more than h200 has: 79.9GiB usable"),
        (2**40, r"is more than h200 has"),
        ("0%", "'0%' is a zero budget"),
        ("-5%", "'-5%' is a negative budget"),
        ("%", "'%' is not a size"),
        (False, "False is not a size"),
        ("huge", '"80%" of the device, or None for all of it'),
    ],
)
def test_budget_errors_name_the_device_and_the_way_out(budget, message):
    with pytest.raises(BudgetError, match=message):
        units.parse_budget(budget, int(79.9 * 2**30), "h200")


def test_bytes_may_be_asked_for_up_to_the_most_and_shares_are_of_what_is_usable():
    assert units.parse_budget("95B", 90, "h200", 100) == 95
    assert (
        units.parse_budget(None, 90, "h200", 100)
        == units.parse_budget("100%", 90, most_bytes=100)
        == 90
    )
    for budget in ("105%", "101B", 101):
        with pytest.raises(BudgetError, match="is more than h200 has: 90B usable"):
            units.parse_budget(budget, 90, "h200", 100)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1.0KiB"),
        (2**20 - 1, "1.0MiB"),
        (2**30 - 1, "1.0GiB"),
        (15354554417, "14.3GiB"),
        (3 * 2**50, "3072.0TiB"),
        (-(2**21), "-2.0MiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert units.format_bytes(nbytes) == text


@given(st.integers(1, 2**60))
def test_a_printed_budget_read_back_is_enough_and_at_most_one_percent_more(nbytes):
    back = units.parse_bytes(units.format_budget(nbytes))
    assert nbytes <= back <= nbytes * 1.01 + 1


@given(st.integers(1, 2**60))
def test_a_printed_size_read_back_is_within_its_last_digit(nbytes):
    back = units.parse_bytes(units.format_bytes(nbytes))
    assert abs(back - nbytes) <= max(1, 0.06 * nbytes)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (3e-9, "3ns"),
        (25e-6, "25.0us"),
        (0.9996e-3, "1.00ms"),
        (0.0123, "12.3ms"),
        (0.130, "130ms"),
        (0.9999, "1.00s"),
        (4.2, "4.20s"),
        (59.999, "1min 00s"),
        (125.4, "2min 05s"),
        (-0.002, "-2.00ms"),
    ],
)
def test_format_seconds(seconds, text):
    assert units.format_seconds(seconds) == text
