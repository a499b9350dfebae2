"""Write the lock files of the running Python: `make lock` (Linux; resolves, installs nothing).

Three files for Python 3.x, each with exact versions of everything, so that pip has nothing left to
decide and `--no-deps` installs them:

- ``py3x.txt``: the package's own dependencies, tests, lint, types, and the demo.
- ``plan-gpu-py3x.txt``: the wheels that compile for an NVIDIA GPU that is not there: XLA's GPU
  compiler, NVIDIA's assembler and its math library, but none of the CUDA libraries.
- ``gpu-py3x.txt``: the same and the CUDA libraries, for a machine that has an NVIDIA GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}"
HEADER = f"# Made by `make lock` with Python {sys.version_info.major}.{sys.version_info.minor}"


def resolve(extra: str, *options: str) -> dict[str, str]:
    """Exact versions of jaxmem[extra] and everything it needs, by package name."""
    command = [
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
        *("--disable-pip-version-check", "--report", "-", f"{FOLDER.parent}[{extra}]", *options),
    ]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    pins = {
        package["metadata"]["name"].lower().replace("_", "-"): package["metadata"]["version"]
        for package in report["install"]
    }
    del pins["jaxmem"]
    return dict(sorted(pins.items()))


def write(path: Path, what: str, pins: dict[str, str]) -> None:
    lines = [f"{HEADER}: {what}.", *(f"{name}=={version}" for name, version in pins.items())]
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.relative_to(FOLDER.parent)}: {len(pins)} packages")


def main() -> None:
    if PYTHON not in ("py311", "py312"):
        sys.exit("lock files are for Python 3.11 and 3.12: make lock VENV=.venv-312")
    lock = FOLDER / f"{PYTHON}.txt"
    base = resolve("dev")
    write(lock, "package, tests, lint, types and demo", base)
    whats = {"plan-gpu": "compile for an absent NVIDIA GPU", "gpu": "run on an NVIDIA GPU"}
    for extra, what in whats.items():
        pins = resolve(extra, "--constraint", str(lock))
        added = {name: version for name, version in pins.items() if name not in base}
        write(FOLDER / f"{extra}-{PYTHON}.txt", what, added)


if __name__ == "__main__":
    main()
