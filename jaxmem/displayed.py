"""Objects that show themselves: tables in a terminal, HTML in a notebook, text everywhere else."""

from __future__ import annotations

from typing import Any


class Displayed:
    """An object that :mod:`jaxmem.show` knows how to show; it is imported when that is asked.

    ``print`` and ``str`` give plain text, ``rich.print`` colours, Jupyter, VS Code and Colab HTML
    without scripts, beside the text for front ends (and diffs of notebooks) that have no HTML.
    """

    def __str__(self) -> str:
        from jaxmem.show.shown import text

        return text(self)

    def __rich__(self) -> Any:
        from jaxmem.show.shown import view

        return view(self)

    def _repr_html_(self) -> str:
        from jaxmem.show.shown import html

        return html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Both; IPython would show what has no ``text/plain`` of its own by its ``repr``."""
        from jaxmem.show.shown import html, text

        return {"text/plain": text(self), "text/html": html(self)}
