"""Launch plans that `needlework doctor` found wrong on this machine: they are never taken here again.

One JSON file in the user's cache directory; a plan is struck off for one combination of GPU, driver, torch, Triton and
needlework, so that a newer compiler gets another chance.
"""

import json
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

STRUCK = "was struck off by doctor"


def path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "needlework" / "doctor.json"


@cache
def machine() -> str:
    """What a verdict holds for."""
    parts = [f"torch {torch.__version__}"]
    for package in ("triton", "needlework"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} not installed as a package")
    if torch.cuda.is_available():
        parts.insert(0, f"{torch.cuda.get_device_name()}, driver {_driver()}")
    return ", ".join(parts)


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("Kernel Module")[-1].split()[0]
    except (OSError, IndexError):
        return "unknown"


@cache
def _read() -> dict[str, dict[str, str]]:
    try:
        return json.loads(path().read_text())
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise ValueError(f"{path()}: not JSON ({e}); delete the file and run `needlework doctor` again") from e


def struck(engine: str, name: str) -> str | None:
    """Why the plan may not be taken on this machine, or None."""
    reason = _read().get(machine(), {}).get(f"{engine}/{name}")
    return None if reason is None else f"{STRUCK} ({reason})"


def record(verdicts: dict[str, str | None]) -> None:
    """Write verdicts, "engine/plan" -> why it failed or None for passed, over those of this machine; the others stay."""
    everything = dict(_read())
    here = everything.get(machine(), {}) | verdicts
    everything[machine()] = {key: reason for key, reason in here.items() if reason is not None}
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(everything, indent=1, sort_keys=True))
    partial.replace(target)
    _read.cache_clear()
