"""Planted bugs: each is applied to a copy of the tree, where the quick tests of what it touches must fail. Survivors are printed.

A mutant is an entry of an area's `.toml`: its name, the sentence that it `breaks`, its edits (a file, the `old` text and the `new`) and the
`tests` that should see it, fewer by `select`, pytest's -k. Mutants of `kernels.toml` are run in Triton's interpreter.
"""

import argparse
import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INTERPRETED = "kernels"  # the area whose tests need TRITON_INTERPRET=1
LONGEST = 600  # seconds; a mutant may loop for ever
WORDS = {"failed": "killed", "passed": "SURVIVES", "error": "NOT JUDGED"}  # the tests of a copy that holds it
ABSENT = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "*.egg-info", "build", "dist")


class Edit(NamedTuple):
    file: str
    old: str
    new: str


class Tests(NamedTuple):
    paths: tuple[str, ...]
    select: str
    interpreted: bool


class Mutant(NamedTuple):
    area: str
    name: str
    breaks: str
    edits: tuple[Edit, ...]
    tests: Tests


def mutants(folder: Path = HERE) -> list[Mutant]:
    return [_mutant(path.stem, **entry) for path in sorted(folder.glob("*.toml")) for entry in _entries(path)]


def _entries(path: Path) -> list[dict]:
    return tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]


def _mutant(area: str, *, name: str, breaks: str, edit: list[dict], tests: list[str], select: str = "") -> Mutant:
    edits = tuple(Edit(**one) for one in edit)
    return Mutant(area, name, breaks, edits, Tests(tuple(tests), select, area == INTERPRETED))


def mutated(mutant: Mutant, root: Path = ROOT) -> dict[Path, str]:
    """The text of every file that it touches, after it. An edit whose old text has gone, or is there twice, plants nothing."""
    texts: dict[Path, str] = {}
    for edit in mutant.edits:
        path = root / edit.file
        text = texts[path] if path in texts else path.read_text(encoding="utf-8")
        if (times := text.count(edit.old)) != 1:
            raise ValueError(f"{mutant.name}: its old text is {times} times in {edit.file}, not once: {edit.old!r}")
        texts[path] = text.replace(edit.old, edit.new)
    for path, text in texts.items():
        if ast.dump(ast.parse(text)) == _program(path.read_text(encoding="utf-8")):
            raise ValueError(f"{mutant.name}: {path.name} is the same program as before")
    return texts


@cache
def _program(text: str) -> str:
    """Of a file as it is, which many mutants have in common."""
    return ast.dump(ast.parse(text))


@contextmanager
def planted(mutant: Mutant, root: Path) -> Iterator[None]:
    texts = mutated(mutant, root)
    before = {path: path.read_text(encoding="utf-8") for path in texts}
    for path, text in texts.items():
        _write(path, text)
    try:
        yield
    finally:
        for path, text in before.items():
            _write(path, text)


def _write(path: Path, text: str) -> None:
    """A text of the same length in the same second would be run from the old one's bytecode."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def verdict(tests: Tests, root: Path) -> tuple[str, str]:
    """ "failed", "passed", or "error" where the tests did not come to judge (an import that fails kills nothing); and what pytest said."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(root),
        "TRITON_INTERPRET": str(int(tests.interpreted)),
    }
    options = ["-x", "-p", "no:cacheprovider", "-m", "not slow", "-k", tests.select, *tests.paths]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return "error", f"not done after {LONGEST} seconds"
    said = ended.stdout + ended.stderr
    if ended.returncode == 0 and re.search(r"\d passed", said):
        return "passed", said
    return "failed" if ended.returncode == 1 and re.search(r"^FAILED ", said, re.MULTILINE) else "error", said


def run(chosen: list[Mutant], workers: int, root: Path = ROOT) -> bool:
    """Whether all are killed by tests that pass without them."""
    began = monotonic()
    for mutant in chosen:
        mutated(mutant, root)  # what plants nothing is refused before anything runs
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(workers):
            trees.put(shutil.copytree(root, Path(folder) / str(i), ignore=ABSENT))

        def judge(tests: Tests, mutant: Mutant | None = None) -> tuple[str, str]:
            tree = trees.get()
            try:
                if mutant is None:
                    return verdict(tests, tree)
                with planted(mutant, tree):
                    return verdict(tests, tree)
            finally:
                trees.put(tree)

        sets = list(dict.fromkeys(mutant.tests for mutant in chosen))
        ready = dict(zip(sets, pool.map(judge, sets), strict=True))
        for tests, (found, said) in ready.items():
            if found != "passed":
                print(f"{found} without any mutant: {' '.join(tests.paths)} {tests.select}\n{said[-3000:]}", flush=True)
        judged = [mutant for mutant in chosen if ready[mutant.tests][0] == "passed"]
        verdicts = pool.map(judge, [mutant.tests for mutant in judged], judged)
        counts, left = {"failed": 0, "passed": 0, "error": 0}, []
        for mutant, (found, said) in zip(judged, verdicts, strict=True):
            counts[found] += 1
            line = f"{WORDS[found]}: {mutant.area}/{mutant.name}: {mutant.breaks}"
            print(line, flush=True)
            if found != "failed":
                left.append(line if found == "passed" else f"{line}\n{said[-3000:]}")
    print("", *left, sep="\n")
    print(
        f"{len(chosen)} mutants in {monotonic() - began:.0f} s: {counts['failed']} killed, {counts['passed']} survive, "
        f"{counts['error']} not judged, {len(chosen) - len(judged)} whose tests fail without them"
    )
    return counts["failed"] == len(chosen) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant; again for another")
    parser.add_argument("--area", action="append", help="the mutants of this .toml; again for another")
    parser.add_argument("--workers", type=int, default=2)
    wanted = parser.parse_args()
    everything = mutants()
    for given, known in ((wanted.only, {m.name for m in everything}), (wanted.area, {m.area for m in everything})):
        if unknown := set(given or ()) - known:
            parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    chosen = [
        m for m in everything if (not wanted.only or m.name in wanted.only) and (not wanted.area or m.area in wanted.area)
    ]
    sys.exit(not run(chosen, wanted.workers))


if __name__ == "__main__":
    main()
