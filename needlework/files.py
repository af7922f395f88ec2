"""Files that are written in full or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Write `text` to `path`, synced to the disk, in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Write `content` to `path`, synced to the disk. A crash or a full disk leaves what was there before.

    The folder is made. The text is in `.<name>.<random>.partial` beside it until it is whole. OSError names `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)  # mkstemp makes it the owner's alone
        os.replace(partial, path)
    except OSError as error:
        os.unlink(partial)
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        os.unlink(partial)
        raise
