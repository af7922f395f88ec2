"""The finished pieces of a measurement, on the disk: a measurement that was stopped resumes, with the same numbers.

    <folder>/measuring-<digest>.json      {"of": what is measured, by what; "pieces": {name: value}}

The digest is that of `of`, so a file holds the pieces of one measurement alone.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from needlework.data import Corpus
from needlework.experiment.claim import plain, write_json
from needlework.experiment.evaluate import Evaluation
from needlework.json_file import read_json
from needlework.train import commit


class Pieces:
    """In `folder`, which is made with the first piece. of: JSON-ready; all that the pieces depend on."""

    def __init__(self, folder: Path, of: dict[str, Any]):
        self.of = plain(of)
        self.path = folder / f"measuring-{hashlib.sha256(json.dumps(self.of, sort_keys=True).encode()).hexdigest()[:16]}.json"
        self.done: dict[str, Any] = read_json(self.path)["pieces"] if self.path.exists() else {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The piece of that name, after a round trip through JSON. `make` is called, and its value written, if there is none yet."""
        if name not in self.done:
            self.done[name] = plain(make())
            write_json(self.path, {"of": self.of, "pieces": self.done})
        return self.done[name]

    def forget(self) -> None:
        """Removes the file: the whole measurement is written elsewhere."""
        self.path.unlink(missing_ok=True)


def measurement(checkpoint: Path, corpus: Corpus, evaluation: Evaluation, device: torch.device) -> dict[str, Any]:
    """All that a checkpoint's measurement depends on: its files, the text, the evaluation, the code and the machine."""
    return {
        "checkpoint": digests(checkpoint),
        "corpus": corpus.manifest["sha256"],
        "evaluation": asdict(evaluation),
        "code": commit(),
        "torch": torch.__version__,
        "device": device_name(device),
    }


def digests(checkpoint: Path) -> dict[str, str]:
    """SHA-256 by name of the files of a checkpoint that a measurement depends on."""
    read = [path for path in sorted(checkpoint.iterdir()) if path.suffix in (".safetensors", ".bin")]
    read += [checkpoint / name for name in ("config.json", "tokenizer.json") if (checkpoint / name).is_file()]
    return {path.name: _digest(path) for path in read}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
