"""Where data sets come from: the Hugging Face Hub, or a folder that mirrors it.

    <folder>/<owner>/<name>/        a data set's repository as it is on the Hub: README.md and its data files
    <folder>/FIXTURE                the data sets are made up: what is measured on them means nothing

`datasets.load_dataset("owner/name")` takes a folder of that name below the working directory for the repository itself, wherever it
is called from. So a mirror is the working directory while a task is loaded, and no task needs to know of it.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from .number import Unavailable


@contextlib.contextmanager
def reachable(folder: Path | None) -> Iterator[None]:
    """Inside, data sets come from `folder` where it has them, else from the Hub. Raises Unavailable for what cannot be had.

    Tasks run code of lm-eval and of `datasets`, which fail in many ways where data, a package or a field is missing; each is a reason.
    """
    try:
        with contextlib.nullcontext() if folder is None else contextlib.chdir(folder):
            yield
    except (Unavailable, MemoryError):
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise Unavailable(f"{type(error).__name__}: {lines[0] if lines else 'no message'}") from error


def is_fixture(folder: Path | None) -> bool:
    """Whether the folder's data sets are made up."""
    return folder is not None and (folder / "FIXTURE").exists()
