"""One process at a time in a directory: the kernel keeps the lock for as long as the process lives.

    <directory>/lock     flock(2) on it; it says who has it: process, host, since when

The lock ends with the process, also by kill -9. The file is never removed: one process could lock the old file
while another makes a new one.
On NFS the server keeps the lock, for all hosts; when a host dies, it lets go only after its lease, a minute or two. A file system
without locks (Lustre mounted without -o flock) keeps no process out; a warning says so.
"""

import errno
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class InUse(RuntimeError):
    """Another process works in the directory; the message names it."""


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """`directory`, which is made, for this process alone; InUse names the process that has it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "lock"
    with path.open("a+b", buffering=0) as file:  # opening it must not empty what its holder has written
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode() or "another process"  # which is about to say so
            raise InUse(f"{directory} is in use by {holder}; wait for it, or end it") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(
                f"{directory}: its file system has no locks ({error.strerror}): nothing keeps a second process out",
                stacklevel=3,
            )
        try:
            file.truncate(0)
            file.write(
                f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S%z')}".encode()
            )
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        yield
