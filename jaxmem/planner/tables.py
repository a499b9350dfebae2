"""Tables of plain data as CSV files."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem.errors import ReportError
from jaxmem.files import replacing

Rows = Callable[[], Iterable[Mapping[str, Any]]]


def names_of(kind: Any) -> list[str]:
    """Names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(kind)]


def write_table(
    path: str | Path, tables: Mapping[str, tuple[Sequence[str], Rows]], table: str
) -> None:
    """Write one of several tables as CSV (RFC 4180, UTF-8), with a line of column names.

    Lists are written as JSON. Names are written as they are: a spreadsheet takes text that begins
    with ``=`` for a formula.

    Args:
        path: the file; it is replaced as a whole, or not at all.
        tables: columns and rows of each table by its name.
        table: the one to write.

    Raises:
        ReportError: there is no table of that name.
        OSError: the file cannot be written.
    """
    if table not in tables:
        raise ReportError(f"no table is called {table!r}: there are {', '.join(tables)}.")
    columns, rows = tables[table]
    with replacing(path, errors="surrogatepass") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_cell(row[name]) for name in columns] for row in rows())


def _cell(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    return "" if value is None else value
