"""Fetch uPlot anew: `make vendor` (needs npm), or `VERSION=1.6.32 make vendor` for another version.

The files of the pinned version must be those that `pinned.json` names; another version is pinned
when it is fetched, and the tests then say whether pages still work with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "jaxmem" / "show" / "assets" / "uplot"
PINNED = FOLDER / "pinned.json"
FILES = ("LICENSE", "dist/uPlot.iife.min.js", "dist/uPlot.min.css")


def fetched(version: str) -> dict[str, bytes]:
    """The files of one published version, by their name here."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", f"uplot@{version}", "--silent", "--pack-destination", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:
            members = {Path(name).name: tar.extractfile(f"package/{name}") for name in FILES}
            return {name: member.read() for name, member in members.items() if member}


def main() -> None:
    pinned = json.loads(PINNED.read_text())
    version = os.environ.get("VERSION") or pinned["version"]
    files = fetched(version)
    hashes = {name: sha256(content).hexdigest() for name, content in files.items()}
    if version == pinned["version"] and hashes != pinned["sha256"]:
        sys.exit(f"uPlot {version} is not what was pinned: {hashes}, pinned {pinned['sha256']}")
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    PINNED.write_text(json.dumps({**pinned, "version": version, "sha256": hashes}, indent=2) + "\n")
    print(f"uPlot {version}: {', '.join(files)}")


if __name__ == "__main__":
    main()
