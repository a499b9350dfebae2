"""The files that every page carries: uPlot as its authors publish it, our own script and style.

Nothing is built: the files of ``show/assets`` are read as they are. uPlot's are checked against the
hashes that ``show/assets/uplot/pinned.json`` names, so a damaged or changed copy is never written
into a page; ``make vendor`` fetches them anew.
"""

from __future__ import annotations

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

_ROOT = files("jaxmem.show") / "assets"
# In the order in which they are read: each may use what those before it define.
SCRIPTS = ("model.js", "dom.js", "chart.js", "table.js", "details.js", "frontier.js", "main.js")
STYLES = ("page.css",)


@cache
def script() -> str:
    """Returns the page's script: uPlot, then our own files in one scope of their own."""
    own = "\n".join(_read(name) for name in SCRIPTS)
    licence = f"/*\nuPlot {uplot_version()}\n{vendored('LICENSE')}*/"
    return f'{licence}\n{vendored("uPlot.iife.min.js")}\n(() => {{\n"use strict";\n{own}\n}})();\n'


@cache
def style() -> str:
    """Returns the page's style sheet."""
    return "\n".join((vendored("uPlot.min.css"), *map(_read, STYLES)))


def vendored(name: str) -> str:
    """Returns a file of uPlot.

    Raises:
        RuntimeError: it is not the file that is pinned.
    """
    pinned = json.loads(_read("uplot/pinned.json"))
    content = (_ROOT / "uplot" / name).read_bytes()
    found = sha256(content).hexdigest()
    if found != pinned["sha256"][name]:
        raise RuntimeError(
            f"jaxmem/show/assets/uplot/{name} is not the file of uPlot {pinned['version']} that "
            f"jaxmem was made with (sha256 {found}). Install jaxmem anew."
        )
    return content.decode("utf-8")


def uplot_version() -> str:
    """Returns the version of uPlot that pages carry."""
    return json.loads(_read("uplot/pinned.json"))["version"]


def csp_hash(text: str) -> str:
    """Returns the source expression of a Content-Security-Policy that allows exactly this text.

    >>> csp_hash("")
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    return f"'sha256-{b64encode(sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _read(name: str) -> str:
    return (_ROOT / name).read_text(encoding="utf-8")
