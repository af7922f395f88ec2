"""results.json: what a comparison measured, and the only thing its report is made from.

A mixer that has not finished is missing from `mixers`. Keys that are lengths are strings ("256"), because JSON has no others.
"""

import json
import math
import os
from typing import Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from needlework.files import write_whole
from needlework.json_file import read_json


class Score(TypedDict):
    """Retrieval at one length: shares in 0..1, and how many digits and values were scored."""

    accuracy: float
    exact: float
    digits: int
    values: int


class Log(TypedDict):
    """What was logged beside the loss, in stretches of steps (curves.py): each with its last step."""

    steps: list[int]
    lr: list[float]
    grad_norm: list[float]
    memory: list[int]


class Sample(TypedDict):
    """A prompt of held-out text, how the model went on, and how the text did."""

    prompt: str
    continuation: str
    text: str


class Training(TypedDict):
    """One training run: the loss (nats per token) at each recorded step, and what it took."""

    steps: list[int]
    loss: list[float]
    tokens: int
    seconds: float
    tokens_per_second: float
    log: NotRequired[Log]


class Mixer(TypedDict):
    """Everything measured about one mixer; the dicts are keyed by length. Beside them each task's scores under its name."""

    name: str
    title: str
    equation: str
    parameters: int
    state_bytes: dict[str, int]
    train: Training
    loss: dict[str, float]
    samples: NotRequired[list[Sample]]


class Corpus(TypedDict):
    """The text that was read."""

    files: int
    bytes: int
    sha256: str


class Results(TypedDict):
    """A whole comparison. `lengths` ascends; every mixer was measured in each of `tasks` at each of them."""

    name: str
    date: str
    train_length: int
    lengths: list[int]
    seed: int
    tasks: NotRequired[list[str]]
    config: dict[str, Any]
    corpus: Corpus
    versions: dict[str, str]
    machine: str
    mixers: list[Mixer]


def tasks_of(results: Results) -> tuple[str, ...]:
    """The tasks of a comparison; of one that does not say, the demo's."""
    return tuple(results.get("tasks", ("needle", "needles")))


def scores_of(mixer: Mixer, task: str) -> dict[str, Score]:
    """A mixer's scores in a task, by length."""
    return mixer[task]  # pyrefly: ignore[bad-typed-dict-key] (a TypedDict cannot say that its other keys are tasks)


def check_results(results: Any) -> None:
    """Raise ValueError that names the first key that is missing, of the wrong type, or not finite."""
    _check(results, Results, "results")
    lengths = results["lengths"]
    if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 1 or results["train_length"] < 1:
        raise ValueError(f"results.lengths must ascend from at least 1 and train_length be >= 1, got {lengths}")
    tasks = tasks_of(results)
    if not tasks:
        raise ValueError("results.tasks is empty, expected at least one: a comparison shows what is found")
    for i, mixer in enumerate(results["mixers"]):
        where = f"results.mixers[{i}]"
        for task in tasks:
            if task not in mixer:
                raise ValueError(f"{where} misses the key {task!r}")
            _check(mixer[task], dict[str, Score], f"{where}.{task}")
        for measure in ("state_bytes", "loss", *tasks):
            missing = [str(length) for length in lengths if str(length) not in mixer[measure]]
            if missing:
                raise ValueError(f"{where}.{measure} misses the key {missing[0]!r}")
        scores = [score for task in tasks for score in mixer[task].values()]
        counted = [mixer["parameters"], *mixer["state_bytes"].values()]
        if min(counted + [score[of] for score in scores for of in ("digits", "values")]) < 1:
            raise ValueError(f"{where}: parameters, state_bytes, digits and values must be at least 1")
        for score in scores:
            if not all(0 <= score[of] <= 1 for of in ("accuracy", "exact")):
                raise ValueError(f"{where}: accuracy and exact must be shares in 0..1, got {score}")
        log = mixer["train"].get("log")
        if log is not None and len({len(column) for column in log.values()}) > 1:
            raise ValueError(f"{where}.train.log: its columns differ in length")
        curve = mixer["train"]
        if len(curve["steps"]) != len(curve["loss"]):
            raise ValueError(
                f"results.mixers[{i}].train: {len(curve['steps'])} steps but {len(curve['loss'])} losses; they go in pairs"
            )


def _check(value: Any, kind: Any, where: str) -> None:
    if is_typeddict(kind):
        _check(value, dict, where)
        for key, inner in get_type_hints(kind).items():
            if key not in value and key in kind.__optional_keys__:
                continue
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
    if isinstance(value, dict | list) and get_args(kind):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check(item, get_args(kind)[-1], f"{where}[{key!r}]")


def load_results(path: str | os.PathLike) -> Results:
    """Read and check a results.json; ValueError names the file and the key that is wrong."""
    results = read_json(path)
    try:
        check_results(results)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return results


def save_results(results: Results, path: str | os.PathLike) -> None:
    """Check, then write results.json whole or not at all."""
    check_results(results)
    write_whole(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
