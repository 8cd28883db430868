"""Figures by which something was decided, as rows of a table."""

from collections.abc import Iterable
from typing import NamedTuple

from headrace.report.tables import Column, Table


class Row(NamedTuple):
    """One figure that something was decided by."""

    name: str
    value: str
    unit: str = ""
    meaning: str = ""


def figures(title: str, rows: Iterable[Row]) -> Table:
    """Return rows as a table."""
    columns = (Column("", right=False), Column("value"), Column("", False), Column("", False))
    return Table(title=title, columns=columns, rows=tuple(tuple(row) for row in rows))
