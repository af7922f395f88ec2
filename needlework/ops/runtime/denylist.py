"""Launch plans that `needlework doctor` found wrong on this machine: they are never taken here again.

One JSON file in the user's cache directory; a plan is struck off in one dtype, for one combination of GPU, driver, torch, Triton and
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

STRUCK = "was struck off by doctor"


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
        told = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    number = re.search(r"Kernel Module.*?(\d+(\.\d+)+)", told)
    return number[1] if number else "unknown"


@functools.cache
def _read() -> dict[str, dict[str, str]]:
    try:
        return json.loads(path().read_text())
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise ValueError(f"{path()}: not JSON ({e}); delete the file and run `needlework doctor` again") from e


def struck(engine: str, name: str, dtype: str | None = None) -> str | None:
    """Why the plan may not be taken on this machine in `dtype` (None: in some dtype), or None."""
    here = _read().get(machine(), {})
    plan = f"{engine}/{name}"
    keys = (plan, f"{plan}/{dtype}") if dtype else [key for key in here if f"{key}/".startswith(f"{plan}/")]
    reason = next((here[key] for key in keys if key in here), None)
    return None if reason is None else f"{STRUCK} ({reason})"


def struck_off() -> frozenset[str]:
    """All that is struck off on this machine: what a choice made earlier still holds for."""
    return frozenset(_read().get(machine(), ()))


def record(verdicts: dict[str, str | None]) -> None:
    """Write verdicts, "engine/plan" or "engine/plan/dtype" -> why it failed or None for passed, over those of this machine."""
    everything = dict(_read())
    here = everything.get(machine(), {}) | verdicts
    everything[machine()] = {key: reason for key, reason in here.items() if reason is not None}
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(everything, indent=1, sort_keys=True))
    partial.replace(target)
    _read.cache_clear()
