"""A suite measured on a checkpoint, kept cell by cell, and its result: one JSON file a checkpoint and suite, whole or not there.

    <folder>/<checkpoint>.<suite>.json     the result
    <folder>/measuring-<digest>.json       the cells of a measurement that has not ended

What was measured before with the same code, checkpoint and conditions stays in the result and is not measured again; of another
checkpoint, or under other conditions, it is not overwritten.
"""

import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from needlework.data import Corpus
from needlework.eval.suites import run
from needlework.eval.suites.harness import SEEDS
from needlework.eval.suites.sources import is_fixture
from needlework.eval.suites.subject import SEED, Subject
from needlework.eval.suites.suite import Suite
from needlework.experiment.claim import differences, plain, write_json
from needlework.experiment.pieces import Pieces, device_name, digests
from needlework.experiment.pretrained import load_model
from needlework.experiment.reader import any_reader, at_once
from needlework.json_file import read_json
from needlework.models import NeedleworkConfig
from needlework.models.causal import absolute_positions, load_causal
from needlework.models.tokenizer import load_tokenizer
from needlework.train import commit, versions

PACKAGES = ("lm-eval", "nltk", "wonderwords", "numpy", "safetensors")


class NothingMeasured(ValueError):
    """No task of a suite could be measured; the message has the reasons."""


def subject_of(
    source: str,
    corpus: Callable[[Tokenizer], Corpus],
    *,
    data: Path | None = None,
    limit: int | None = None,
    full_context: bool = False,
) -> Subject:
    """The model and tokenizer of a folder or of a name on the Hub, on the GPU where there is one.

    corpus: tokenizer -> the text of tasks made of the user's own. full_context: without the windows that a model of ours
    was trained with. ValueError for a folder or name that holds no model, and for windows of a model that is none of ours.
    """
    if data is not None and not data.is_dir():
        raise ValueError(f"--data {data}: expected a folder of data sets, <owner>/<name>/ as on the Hub")
    model: Any = _model(source, full_context)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(source)
    words = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    words.no_padding()
    words.no_truncation()
    autocast = torch.bfloat16 if model.device.type == "cuda" and model.dtype == torch.float32 else None
    return Subject(
        model=model,
        tokenizer=tokenizer,
        tokenizer_at=str(Path(source).resolve()) if Path(source).is_dir() else source,
        read=any_reader(model, autocast),
        at_once=partial(at_once, model),
        words=words,
        corpus=cache(lambda: corpus(words)),
        autocast=None if autocast is None else "bfloat16",
        positions=absolute_positions(model),
        data=None if data is None else data.resolve(),
        limit=limit,
    )


def _model(source: str, full_context: bool) -> Any:
    folder = Path(source)
    described = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    if isinstance(described, dict) and described.get("model_type") == NeedleworkConfig.model_type:
        model = load_model(folder).eval()
        return load_model(folder, model.config.full_context()).eval() if full_context else model
    if full_context:
        raise ValueError(f"--full-context: {source} is no model of needlework, whose windows could be opened")
    return load_causal(source)


def identity(suite: Suite, source: str, subject: Subject, full_context: bool) -> dict[str, Any]:
    """All that a cell depends on besides its task and length."""
    folder = Path(source)
    weights = (
        digests(folder) if folder.is_dir() else {"hub": source, "revision": getattr(subject.model.config, "_commit_hash", None)}
    )
    return plain(
        {
            "suite": suite.name,
            "checkpoint": weights,
            "full_context": full_context,
            "fixture": is_fixture(subject.data) and not suite.own_text,
            "limit": subject.limit,
            "autocast": subject.autocast,
            "device": device_name(subject.model.device),
            "code": commit(),
            "versions": versions(*PACKAGES),
        }
        | ({"corpus": subject.corpus().manifest["sha256"]} if suite.own_text else {})
    )


def measure(
    suite: Suite,
    source: str,
    subject: Subject,
    folder: Path,
    lengths: Iterable[int] = (),
    tasks: Iterable[str] = (),
    *,
    full_context: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, dict[str, Any]]:
    """Measures a suite and writes its result. Returns the file and what it holds.

    ValueError if a result of another measurement lies there, NothingMeasured, a ValueError, if that is so; KeyboardInterrupt leaves what
    is done.
    """
    run.check(suite)
    path = folder / f"{title_of(source, full_context).replace('/', '--')}.{suite.name}.json"
    of = identity(suite, source, subject, full_context)
    before = _before(path, of)
    pieces = Pieces(folder, of)
    pieces.done = {name: cell for name, cell in before.items() if "metrics" in cell} | pieces.done
    cells = before | run.measure(suite, subject, lengths, tasks, pieces.once, say)
    if not any("metrics" in cell for cell in cells.values()):
        reasons = dict.fromkeys(str(cell.get("skipped")) for cell in cells.values())
        raise NothingMeasured(f"suite {suite.name}: none of its tasks could be measured: {'; '.join(reasons)}")
    result = _result(suite, source, subject, of, cells, full_context)
    write_json(path, result)
    pieces.forget()
    return path, result


def title_of(source: str, full_context: bool = False) -> str:
    """What a checkpoint is called: its name on the Hub, or its folder's with the one above, without a last "checkpoint"."""
    if Path(source).is_dir():
        parts = Path(source).resolve().parts[1:]
        source = "/".join((parts[:-1] if parts[-1] == "checkpoint" else parts)[-2:])
    return f"{source} (full context)" if full_context else source


def _before(path: Path, of: dict[str, Any]) -> dict[str, Any]:
    """The cells of a result that is there; ValueError if it is of another measurement."""
    if not path.exists():
        return {}
    there = read_json(path)
    if different := differences(there.get("of"), of):
        raise ValueError(
            f"{path} is of another measurement ({', '.join(sorted(different)[:6])} differ); remove it, or choose another --to"
        )
    return there["cells"]


def _result(
    suite: Suite, source: str, subject: Subject, of: dict[str, Any], cells: dict[str, Any], full_context: bool
) -> dict[str, Any]:
    return plain(
        {
            "suite": suite.name,
            "title": suite.title,
            "source": suite.source,
            "length_is": suite.length_is,
            "fixture": of["fixture"],
            "limit": subject.limit,
            "checkpoint": {
                "title": title_of(source, full_context),
                "at": source,
                "parameters": subject.model.num_parameters(),
                "model_type": subject.model.config.model_type,
                "dtype": str(subject.model.dtype),
                "config": subject.model.config.to_diff_dict(),
            },
            "seeds": {"lm_eval": SEEDS, "ours": SEED},
            "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
            "of": of,
            "cells": cells,
            "means": suite.averages(cells),
        }
    )
