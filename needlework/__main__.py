"""`python -m needlework`, and `needlework`: the command line, and what it says where what it needs is not installed."""

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec


def main() -> None:
    try:
        from needlework.cli import main as command_line

        command_line()
    except ModuleNotFoundError as missing:
        if not extra(missing.name):
            raise
        package = missing.name.partition(".")[0]
        lacking = shlex.join(line for name, line in _extras().items() if find_spec(name) is None)
        raise SystemExit(f"needlework: {package} is not installed; pip install {lacking}") from None


def extra(module: str | None) -> bool:
    """Whether it is of one of the packages that `pip install needlework` alone leaves out."""
    return (module or "").partition(".")[0] in _extras()


def _extras() -> dict[str, str]:
    """Name and requirement of each package of the extra `all`, as the installed metadata has them."""
    try:
        wanted = requires("needlework") or []
    except PackageNotFoundError:
        return {}
    lines = [line.partition(";")[0].strip() for line in wanted if 'extra == "all"' in line]
    return {re.match(r"[\w-]+", line)[0]: line for line in lines}


if __name__ == "__main__":
    main()
