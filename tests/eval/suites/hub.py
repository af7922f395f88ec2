"""A mirror of the Hub with a few made-up rows of every data set that a suite reads: paths, configs, splits, fields and types are those of
the real ones, as the YAML and the code of lm-eval's tasks ask for them."""

import json
from pathlib import Path
from typing import Any

from . import long_texts, zero_shot
from .rows import Data

DATA = [*zero_shot.DATA, *long_texts.DATA]


def write(folder: Path) -> Path:
    """The mirror, marked as a fixture."""
    folder.mkdir(parents=True)
    (folder / "FIXTURE").write_text("A few made-up rows of each data set.\n")
    for path in dict.fromkeys(data.path for data in DATA):
        (folder / path).mkdir(parents=True)
        configs = [data for data in DATA if data.path == path]
        for data in configs:
            (folder / path / data.config).mkdir()
            for split, rows in data.splits.items():
                (folder / path / data.config / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / path / "README.md").write_text("---\n" + "\n".join(_card(configs)) + "\n---\n")
    return folder


def _card(configs: list[Data]) -> list[str]:
    """The head of a data set's README: its configs, their files, and the types of their fields."""
    files = [
        {
            "config_name": data.config,
            "data_files": [{"split": split, "path": f"{data.config}/{split}.jsonl"} for split in data.splits],
        }
        for data in configs
    ]
    infos = [
        {"config_name": data.config, "features": [{"name": name} | _type(kind) for name, kind in data.fields.items()]}
        for data in configs
        if data.fields
    ]
    return [f"configs: {json.dumps(files)}"] + ([f"dataset_info: {json.dumps(infos)}"] if infos else [])


def _type(kind: Any) -> dict[str, Any]:
    match kind:
        case str():
            return {"dtype": kind}
        case [inner]:
            return {"list": inner}
        case tuple():
            return {"dtype": {"class_label": {"names": {str(i): name for i, name in enumerate(kind)}}}}
        case _:
            return {"struct": [{"name": name} | _type(inner) for name, inner in kind.items()]}
