"""log.jsonl: one line per logged step, cut back to the step that a run resumes from; the same for TensorBoard, if asked for."""

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import torch


class Log:
    """Appends to directory/log.jsonl, after dropping the lines past `step` and whatever a kill left half written.

    tensorboard: also writes directory/tensorboard/. Raises ValueError, saying what to install, if TensorBoard is not installed.
    """

    def __init__(self, directory: Path, step: int, tensorboard: bool = False):
        self.tensorboard = summary_writer()(str(directory / "tensorboard"), purge_step=step + 1) if tensorboard else None
        self.path = directory / "log.jsonl"
        # Unbuffered: a line is on its way before the next step begins, and closing a full disk's file raises nothing new.
        self.file = self.path.open("ab", buffering=0)
        self.file.truncate(_length_up_to(self.path, step))

    def write(self, **record: Any) -> None:
        """One line; "step" is among the fields. A number that is not finite is written as null."""
        plain = {name: value if _writable(value) else None for name, value in record.items()}
        try:
            self.file.write(json.dumps(plain, allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if self.tensorboard is not None:
            for name, value in plain.items():
                if isinstance(value, int | float) and name != "step":
                    self.tensorboard.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """To the disk itself: a checkpoint must not outlive the lines that led to it."""
        os.fsync(self.file.fileno())

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()
        if self.tensorboard is not None:
            self.tensorboard.close()


def logged(directory: Path) -> list[dict[str, Any]]:
    """The whole lines of directory/log.jsonl that are of steps; none where there is no log."""
    path = directory / "log.jsonl"
    lines = []
    for text in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if text.endswith(b"\n") and "loss" in (line := json.loads(text)):
            lines.append(line)
    return lines


class Silence:
    """The log of every rank but the first."""

    def write(self, **record: Any) -> None:
        pass

    def sync(self) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


def summary_writer() -> type:
    """TensorBoard's; ValueError, saying what to install, where it is not."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("tensorboard=True: TensorBoard is not installed: pip install tensorboard") from error
    return SummaryWriter


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that PyTorch held on the GPU, or the most that the process held on the machine, so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _writable(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _length_up_to(path: Path, step: int) -> int:
    """Bytes of the whole lines of steps up to `step`."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] > step or not line.endswith(b"\n"):
                break
        except (ValueError, KeyError, TypeError):
            break
        length += len(line)
    return length
