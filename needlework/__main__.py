"""`python -m needlework`, and `needlework`: the command line, and what it says where what it needs is not installed."""

import shlex
from importlib.util import find_spec

from needlework.extras import VersionError, extra, extras


def main() -> None:
    try:
        from needlework.cli import main as command_line

        command_line()
    except VersionError as error:
        raise SystemExit(f"needlework: {error}") from None
    except ModuleNotFoundError as missing:
        if missing.name is None or not extra(missing.name):
            raise
        package = missing.name.partition(".")[0]
        lacking = shlex.join(line for name, line in extras().items() if find_spec(name) is None)
        raise SystemExit(f"needlework: {package} is not installed; pip install {lacking}") from None


if __name__ == "__main__":
    main()
