"""`needlework eval CHECKPOINT --suite NAME`: what is asked for, what is printed while it is measured, and the numbers at the end."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from .app import console, errors


def measure_suites(
    source: str,
    names: Sequence[str],
    *,
    corpus: Sequence[Path] | None,
    lengths: Sequence[int],
    tasks: Sequence[str],
    data: Path | None,
    limit: int | None,
    full_context: bool,
    to: Path,
    as_json: bool,
) -> None:
    """Measures each suite and writes its result; stopped by Ctrl-C, the same command goes on."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's and datasets' bars are for a screen
    from needlework.eval.suites import find, run

    suites = [find(name) for name in dict.fromkeys(names)]
    for suite in suites:
        suite.cells(lengths, tasks)  # what is asked wrongly is said before a model is loaded
        run.check(suite)

    from needlework.data import CorpusConfig, load_corpus
    from needlework.experiment.recipe import OWN_TEXT
    from needlework.experiment.suites import NothingMeasured, measure, subject_of

    own: dict[str, Any] = {"kind": "files", "paths": tuple(map(str, corpus)), "max_bytes": OWN_TEXT} if corpus else {}
    text = CorpusConfig(**own)
    subject = subject_of(
        source, lambda tokenizer: load_corpus(text, tokenizer), data=data, limit=limit, full_context=full_context
    )
    say = lambda line: errors.print(line, soft_wrap=True)
    results, empty = {}, []
    for suite in suites:
        try:
            path, result = measure(suite, source, subject, to, lengths, tasks, full_context=full_context, say=say)
        except KeyboardInterrupt:
            errors.print(
                f"stopped; the cells that are done are kept in {to}, and the same command goes on from them", soft_wrap=True
            )
            raise
        except NothingMeasured as error:  # of this suite: the others are measured
            empty.append(str(error))
            continue
        results[suite.name] = result
        if as_json:
            continue
        if result["fixture"]:
            console.print("FIXTURE: made-up data sets; these numbers mean nothing")
        console.print(numbers(result))
        console.print(f"result: {path}; needlework report {to} sets it beside others and the papers'", soft_wrap=True)
    if as_json and results:
        print(json.dumps(results, indent=1))
    if empty:
        raise ValueError("; ".join(empty))


def numbers(result: dict[str, Any]) -> Table:
    """Every number of a result, one row each."""
    table = Table("task", result["length_is"], "metric", "value", "documents", box=None, pad_edge=False)
    for name, cell in result["cells"].items():
        task, _, length = name.rpartition("@")
        for metric, number in cell.get("metrics", {}).items():
            table.add_row(task, length, metric, f"{number['value']:.4g}", str(len(number["documents"])))
        if "skipped" in cell:
            table.add_row(task, length, "", "skipped", "")
    for name, mean in result["means"].items():
        mean_of, _, length = name.rpartition("@")
        lacks = ", ".join(mean["missing"])
        table.add_row(mean_of, length, "", f"none without {lacks}" if lacks else f"{mean['value']:.4g}", "")
    return table
