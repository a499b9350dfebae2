"""What a measurement of a GPU looks like, for tests of what is done with one."""

from __future__ import annotations

from jaxmem.targets.measured import Measurement

MADE = Measurement(
    flops={"bfloat16": 6e14, "float32": 3e14},
    hbm_bytes_per_second=4e12,
    h2d_bytes_per_second=54e9,
    d2h_bytes_per_second=53e9,
    duplex_bytes_per_second=46e9,
    d2d_bytes_per_second=None,
    when="2026-11-22T00:30Z",
    seconds=2.5,
)
