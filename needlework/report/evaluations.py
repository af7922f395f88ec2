"""Results of suites (needlework.experiment.suites) side by side, and beside what the papers print: evaluation.md.

Ours have a 95 % interval of their documents. The papers' are as they print them, and are marked.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from needlework.eval.suites import SUITES
from needlework.eval.suites.number import AS_IT_IS
from needlework.files import write_whole
from needlework.json_file import json_files, read_json

from .bootstrap import interval, interval_of_mean
from .markdown import table
from .published import Row, Table, published

PAGE = "evaluation.md"
KEYS = ("suite", "title", "source", "length_is", "fixture", "limit", "checkpoint", "cells", "means")


class Column(NamedTuple):
    """A metric of a task, or a mean where there is no metric, at one length."""

    name: str
    length: int
    metric: str

    @property
    def heading(self) -> str:
        return f"{self.name} {self.metric}{' ↓' * (self.metric in AS_IT_IS)}".strip()

    @property
    def printed(self) -> tuple[str, ...]:
        """What a paper's column may be called: with the length, or without where the paper does not say it."""
        return f"{self.name}@{self.length} {self.metric}".strip(), f"{self.name} {self.metric}".strip()


def is_evaluation(directory: Path) -> bool:
    """Whether results of suites lie in a folder, by their files' names: a sweep's results are many megabytes."""
    return any(path.name.split(".")[-2] in SUITES for path in _files(directory))


def load_evaluations(directory: Path) -> list[dict[str, Any]]:
    """The results in a folder, by suite and checkpoint; ValueError names a file that is none, and the key that it lacks."""
    found = []
    for path in _files(directory):
        result = read_json(path)
        if not _is_result(result):
            raise ValueError(f"{path}: expected a suite's result, with its suite and cells")
        if missing := [key for key in KEYS if key not in result]:
            raise ValueError(f"{path}: misses the key {missing[0]!r}")
        found.append(result)
    return found


def write_page(results: Sequence[dict[str, Any]], directory: Path) -> Path:
    """evaluation.md in `directory`: a section a suite, a table a length. Equal results give equal bytes."""
    sections = ["# Evaluation", _READING]
    for suite in dict.fromkeys(result["suite"] for result in results):
        sections += _suite([result for result in results if result["suite"] == suite])
    write_whole(directory / PAGE, "\n\n".join(sections) + "\n")
    return directory / PAGE


_READING = (
    "Shares are in per cent; of columns with ↓ less is better. Brackets are the 95 % interval of another draw of the same kind of documents "
    "(bootstrap; Wilson's where all are right or all wrong); they do not cover another training run. A mean is given only if all of its "
    "tasks were measured. Rows that name a paper are that paper's own figures, on other hardware, data and code; ± is the paper's."
)


def _suite(results: list[dict[str, Any]]) -> list[str]:
    first, tables = results[0], published(results[0]["suite"])
    sections = [f"## {first['suite']}: {first['title']}", f"After {first['source']}. A length is the {first['length_is']}."]
    if any(result["fixture"] for result in results):
        sections.append(
            "**FIXTURE** rows were measured on made-up documents. They show that the command runs, and nothing else."
        )
    for length in sorted({column.length for result in results for column in _columns(result)}):
        columns = list(dict.fromkeys(column for result in results for column in _columns(result) if column.length == length))
        ours = [[_name(result), *(_cell(result, column) for column in columns)] for result in results]
        theirs = [[_printed_name(row), *(_printed(row, column) for column in columns)] for one in tables for row in one.rows]
        lines = [line for line in (*ours, *theirs) if any(line[1:])]
        sections += [f"### {length:,}", table(["model", *(column.heading for column in columns)], lines)]
    return sections + _notes(results, tables)


def _columns(result: dict[str, Any]) -> list[Column]:
    """What was measured, in the order of the cells, then the means."""
    found = []
    for name, cell in result["cells"].items():
        task, _, length = name.rpartition("@")
        found += [Column(task, int(length), metric) for metric in cell.get("metrics", ())]
    for name in result["means"]:
        mean, _, length = name.rpartition("@")
        found.append(Column(mean, int(length), ""))
    return found


def _name(result: dict[str, Any]) -> str:
    marks = ["FIXTURE"] * result["fixture"]
    marks += [] if result["limit"] is None else [f"first {result['limit']} documents"]
    return f"**{result['checkpoint']['title']}**" + (f" ({', '.join(marks)})" if marks else "")


def _cell(result: dict[str, Any], column: Column) -> str:
    at = f"{column.name}@{column.length}"
    if not column.metric:
        mean = result["means"].get(at)
        if mean is None or mean["value"] is None:
            return "" if mean is None else "—"
        return _written(mean["value"], interval_of_mean([_number(result, *of) for of in _of(result, column)]), 100)
    number = result["cells"].get(at, {}).get("metrics", {}).get(column.metric)
    return "" if number is None else _written(number["value"], interval(number), 1 if column.metric in AS_IT_IS else 100)


def _of(result: dict[str, Any], column: Column) -> list[tuple[str, str]]:
    """The cells and metrics of a mean."""
    return [(f"{task}@{column.length}", metric) for task, metric in result["means"][f"{column.name}@{column.length}"]["of"]]


def _number(result: dict[str, Any], cell: str, metric: str) -> Any:
    return result["cells"][cell]["metrics"][metric]


def _written(value: float, ends: tuple[float, float] | None, times: int) -> str:
    said = f"{times * value:.4g}"
    return said if ends is None else f"{said} [{times * ends[0]:.3g}, {times * ends[1]:.3g}]"


def _printed_name(row: Row) -> str:
    return f"{row.model} ({row.source})"


def _printed(row: Row, column: Column) -> str:
    name = next((name for name in column.printed if name in row.values), None)
    if name is None:
        return ""
    return f"{row.values[name]:g}" + (f" ± {row.spread[name]:g}" if name in row.spread else "")


def _notes(results: list[dict[str, Any]], tables: list[Table]) -> list[str]:
    """What is not in the tables: skipped cells with their reasons, cut documents, remarks on the papers' rows."""
    lines = []
    for result in results:
        title = result["checkpoint"]["title"]
        for name, cell in result["cells"].items():
            if "skipped" in cell:
                lines.append(f"- {title}: {name} was not measured: {cell['skipped']}")
            lines += [f"- {title}: {name}: {warning}" for warning in cell.get("warnings", ())]
    lines += [f"- {one.source}: {one.note}." for one in tables if one.note]
    return ["\n".join(dict.fromkeys(lines))] if lines else []


def _files(directory: Path) -> list[Path]:
    return [path for path in json_files(directory) if not path.name.startswith("measuring-")]


def _is_result(value: Any) -> bool:
    return isinstance(value, dict) and "suite" in value and "cells" in value
