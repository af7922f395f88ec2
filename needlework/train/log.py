"""log.jsonl: one line per logged step, cut back to the step that a run resumes from."""

import json
import os
from pathlib import Path


class Log:
    """Appends to `path`, after dropping the lines past `step` and whatever a kill left half written."""

    def __init__(self, path: Path, step: int):
        self.path = path
        # Unbuffered: a line is on its way before the next step begins, and closing a full disk's file raises nothing new.
        self.file = path.open("ab", buffering=0)
        self.file.truncate(_length_up_to(path, step))

    def write(self, **record: float):
        try:
            self.file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def sync(self):
        """To the disk itself: a checkpoint must not outlive the lines that led to it."""
        os.fsync(self.file.fileno())

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()


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
