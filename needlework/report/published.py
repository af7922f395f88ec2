"""The numbers that papers print, from published.toml: what they are, of which model, and where each is printed."""

import tomllib
from importlib.resources import files
from typing import NamedTuple


class Row(NamedTuple):
    """A model's numbers by column, as printed. spread: of columns that have one."""

    model: str
    source: str
    values: dict[str, float]
    spread: dict[str, float]


class Table(NamedTuple):
    """A table of a paper: its rows, and what a reader must know to compare with them."""

    suite: str
    source: str
    note: str
    rows: tuple[Row, ...]


def published(suite: str) -> list[Table]:
    """The tables with numbers of a suite, in the file's order."""
    text = files("needlework.report").joinpath("published.toml").read_text(encoding="utf-8")
    return [_table(entry) for entry in tomllib.loads(text)["table"] if entry["suite"] == suite]


def _table(entry: dict) -> Table:
    source, columns = f"{entry['paper']}, {entry['source']}", entry["columns"]
    rows = [
        Row(
            row["model"],
            source,
            dict(zip(columns, row["values"], strict=True)),
            dict(zip(columns, row.get("spread", [0] * len(columns)), strict=True)) if "spread" in row else {},
        )
        for row in entry["rows"]
    ]
    return Table(entry["suite"], source, entry.get("note", ""), tuple(rows))
