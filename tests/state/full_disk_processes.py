"""Starts full_disk.py as two processes, where this one is. See test_full_disk.py."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import cluster

if __name__ == "__main__":
    for out in cluster.run(Path(__file__).parent / "full_disk.py", sys.argv[1]):
        print(out)
