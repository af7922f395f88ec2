"""Launch configs that `needlework doctor` found wrong on this machine; none of them is taken here again.

One JSON file in the user's cache directory. An entry holds for one config and dtype on one GPU, driver, torch, Triton and
needlework with its kernels' text, so that a newer compiler, and a repaired kernel, get another chance.
"""

import functools
import hashlib
import json
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from needlework.files import write_whole

DENYLISTED = "is on doctor's denylist"


def cache() -> Path:
    """The user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "needlework"


def path() -> Path:
    return cache() / "doctor.json"


@functools.cache
def machine() -> str:
    """What a verdict holds for."""
    parts = [f"torch {torch.__version__}"]
    for package in ("triton", "needlework"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} not installed as a package")
    parts[-1] += f" (kernels {_digest()})"
    if torch.cuda.is_available():
        parts.insert(0, f"{torch.cuda.get_device_name()}, driver {_driver()}")
    return ", ".join(parts)


def _digest() -> str:
    """Of the kernels and their tables: a checkout's version says nothing of them."""
    ops = Path(__file__).parents[1]
    files = [file.read_bytes() for file in sorted([*ops.rglob("*.py"), *ops.rglob("*.launch.json")])]
    return hashlib.sha256(b"".join(text for text in files if b"import triton" in text or text.startswith(b"["))).hexdigest()[:8]


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    number = re.search(r"Kernel Module.*?(\d+(\.\d+)+)", text)
    return number[1] if number else "unknown"


@functools.cache
def _read() -> dict[str, dict[str, str]]:
    try:
        return json.loads(path().read_text())
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise ValueError(f"{path()}: not JSON ({e}); delete the file and run `needlework doctor` again") from e


def denied(engine: str, name: str, dtype: str | None = None) -> str | None:
    """Why the config may not be taken on this machine in `dtype` (None: in some dtype), or None."""
    here = _read().get(machine(), {})
    config = f"{engine}/{name}"
    keys = (config, f"{config}/{dtype}") if dtype else [key for key in here if f"{key}/".startswith(f"{config}/")]
    reason = next((here[key] for key in keys if key in here), None)
    return None if reason is None else f"{DENYLISTED} ({reason})"


def denylist() -> frozenset[str]:
    """Every entry for this machine; a choice made earlier holds while this is the same."""
    return frozenset(_read().get(machine(), ()))


def record(verdicts: dict[str, str | None]) -> None:
    """Write verdicts, "engine/config" or "engine/config/dtype" -> why it failed or None for passed, over those of this machine."""
    everything = dict(_read())
    here = everything.get(machine(), {}) | verdicts
    everything[machine()] = {key: reason for key, reason in here.items() if reason is not None}
    write_whole(path(), json.dumps(everything, indent=1, sort_keys=True))
    _read.cache_clear()
