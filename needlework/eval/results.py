"""results.json: what a comparison measured, and the only thing its report is made from.

A mixer that has not finished is missing from `mixers`. Keys that are lengths are strings ("256"), because JSON has no others.
"""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, TypedDict, get_args, get_origin, get_type_hints, is_typeddict


class Score(TypedDict):
    """Retrieval at one length: shares in 0..1, and how many digits and values were scored."""

    accuracy: float
    exact: float
    digits: int
    values: int


class Training(TypedDict):
    """One training run: the loss (nats per token) at each recorded step, and what it took."""

    steps: list[int]
    loss: list[float]
    tokens: int
    seconds: float
    tokens_per_second: float


class Mixer(TypedDict):
    """Everything measured about one mixer; the dicts are keyed by length."""

    name: str
    title: str
    equation: str
    parameters: int
    state_bytes: dict[str, int]
    train: Training
    loss: dict[str, float]
    needle: dict[str, Score]
    needles: dict[str, Score]


class Corpus(TypedDict):
    """The text that was read."""

    files: int
    bytes: int
    sha256: str


class Results(TypedDict):
    """A whole comparison. `lengths` ascends; every mixer was measured at each of them."""

    name: str
    date: str
    train_length: int
    lengths: list[int]
    seed: int
    config: dict[str, Any]
    corpus: Corpus
    versions: dict[str, str]
    machine: str
    mixers: list[Mixer]


def check_results(results: Any) -> None:
    """Raise ValueError that names the first key that is missing, of the wrong type, or not finite."""
    _check(results, Results, "results")
    lengths = results["lengths"]
    if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 1 or results["train_length"] < 1:
        raise ValueError(f"results.lengths must ascend from at least 1 and train_length be >= 1, got {lengths}")
    for i, mixer in enumerate(results["mixers"]):
        for measure in ("state_bytes", "loss", "needle", "needles"):
            missing = [str(length) for length in lengths if str(length) not in mixer[measure]]
            if missing:
                raise ValueError(f"results.mixers[{i}].{measure} misses the key {missing[0]!r}")
        counted = [mixer["parameters"], *mixer["state_bytes"].values()]
        counted += [
            score[of] for task in ("needle", "needles") for score in mixer[task].values() for of in ("digits", "values")
        ]
        if min(counted) < 1:
            raise ValueError(f"results.mixers[{i}]: parameters, state_bytes, digits and values must be at least 1")
        curve = mixer["train"]
        if len(curve["steps"]) != len(curve["loss"]):
            raise ValueError(
                f"results.mixers[{i}].train: {len(curve['steps'])} steps but {len(curve['loss'])} losses; they go in pairs"
            )


def _check(value: Any, kind: Any, where: str) -> None:
    if is_typeddict(kind):
        _check(value, dict, where)
        for key, inner in get_type_hints(kind).items():
            if key not in value:
                raise ValueError(f"{where} misses the key {key!r}")
            _check(value[key], inner, f"{where}.{key}")
        return
    container = get_origin(kind) or kind
    accepted = (int, float) if container is float else container
    if container is not Any and (not isinstance(value, accepted) or isinstance(value, bool)):
        raise ValueError(f"{where} must be {container.__name__}, got {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} must be finite, got {value}")
    if get_args(kind):
        items = value.items() if container is dict else enumerate(value)
        for key, item in items:
            _check(item, get_args(kind)[-1], f"{where}[{key!r}]")


def load_results(path: str | os.PathLike) -> Results:
    """Read and check a results.json; ValueError names the file and the key that is wrong."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
        check_results(results)
    except ValueError as error:  # json's own errors are ValueErrors with line and column
        raise ValueError(f"{path}: {error}") from None
    return results


def save_results(results: Results, path: str | os.PathLike) -> None:
    """Check, then write results.json whole or not at all."""
    check_results(results)
    write_whole(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def write_whole(path: str | os.PathLike, content: str) -> None:
    """Put content at path so that a crash or a full disk leaves what was there before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it the owner's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
