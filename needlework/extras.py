"""The packages of the extra `all`, whether a module is one of theirs, and the error for a release that is not supported."""

import re
from importlib.metadata import PackageNotFoundError, requires


class VersionError(ImportError):
    """A package is installed in a release that needlework does not work with."""


def extra(module: str | None) -> bool:
    """Whether it is of one of the packages that `pip install needlework` alone leaves out."""
    return (module or "").partition(".")[0] in extras()


def extras() -> dict[str, str]:
    """Name and requirement of each package of the extra `all`, as the installed metadata has them."""
    try:
        wanted = requires("needlework") or []
    except PackageNotFoundError:
        return {}
    lines = [line.partition(";")[0].strip() for line in wanted if 'extra == "all"' in line]
    return {name[0]: line for line in lines if (name := re.match(r"[\w-]+", line))}
