"""`python -m needlework`, and `needlework`: the command line, and what it says where what it needs is not installed."""

import re
from importlib.metadata import PackageNotFoundError, requires


def main() -> None:
    try:
        from needlework.cli import main as command_line

        command_line()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if not _extra(package):
            raise
        raise SystemExit(f"needlework: {package} is not installed; pip install 'needlework[all]'") from None


def _extra(package: str) -> bool:
    """Whether it is one of those that `pip install needlework` alone leaves out."""
    try:
        wanted = requires("needlework") or []
    except PackageNotFoundError:
        return False
    return any(re.match(r"[\w-]+", line)[0] == package for line in wanted if 'extra == "all"' in line)


if __name__ == "__main__":
    main()
