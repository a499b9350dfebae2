"""How rows of the benchmarks compare what was predicted with what was measured."""

from __future__ import annotations

import pytest

from benchmarks.timing import as_predicted, compared


@pytest.mark.parametrize("unit", ["seconds", "ms"])
def test_a_row_says_what_was_predicted_over_what_was_measured(unit: str):
    row = {f"predicted_{unit}": 3.0, unit: 4.0}
    assert compared(row) == {"predicted_over_measured": 0.75}
    assert as_predicted(row) == ", predicted 0.750 of it"


@pytest.mark.parametrize(
    "row",
    [{"seconds": 4.0}, {"predicted_seconds": 3.0}, {"predicted_seconds": 3.0, "ms": 4.0}],
    ids=["not predicted", "not measured", "of two units"],
)
def test_a_row_that_lacks_one_of_them_says_nothing(row: dict):
    assert compared(row) == {}
    assert as_predicted(row) == ""
