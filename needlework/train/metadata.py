"""Run metadata: config, commit, versions, host, devices and ranks of every start of a run, the newest last.

The file is ran.json, whose name is kept so that runs begun earlier go on.
"""

import json
import os
import platform
import subprocess
import sys
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from needlework.files import write_whole
from needlework.json_file import read_json

from .world import World

ROOT = Path(__file__).parents[2]


@cache
def commit() -> dict[str, Any]:
    """{"commit", "dirty"} of the checkout that this package is run from; {"commit": None} if it is none, or there is no git."""
    if not (ROOT / ".git").exists():
        return {"commit": None}
    try:
        head = _git("rev-parse", "HEAD")
        return {"commit": head.strip(), "dirty": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None}


def write(path: Path, config: dict[str, Any], world: World, device: torch.device, resumed_from: Path | None) -> dict[str, Any]:
    """Adds this start's entry to the file at `path`, and returns it. Whole or not at all."""
    entry = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "command": sys.argv,
        "config": config,
        "seed": config["seed"],
        **commit(),
        "versions": versions(),
        "host": platform.node(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "ranks": {"shard": world.shard, "sequence": world.sequence, "tensor": world.tensor},
        "threads": torch.get_num_threads(),
        "resumed_from": resumed_from and resumed_from.name,
    }
    entries = read_json(path) if path.exists() else []
    write_whole(path, json.dumps([*entries, entry], indent=1) + "\n")
    return entry


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout


def versions(*more: str) -> dict[str, str]:
    """Of Python, and of the packages that training uses and `more` that are installed."""
    found: dict[str, str] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("needlework", "transformers", "triton", "datasets", "tokenizers", "liger-kernel", *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
