"""What tests of several rooms share: the command line in this process, and a little real text."""

import ast
import importlib
import signal
import sys
from pathlib import Path

import pytest

from needlework.data import CorpusConfig

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def handlers():
    """What hears signals is as before: a command sets it for its whole process, which here is not its own."""
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)}
    yield
    for sign, handler in before.items():
        signal.signal(sign, handler)


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of benchmarks/, which is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in [n for n, m in sys.modules.items() if Path(getattr(m, "__file__", None) or "/").parent == BENCHMARKS]:
        del sys.modules[name]


@pytest.fixture
def needlework(capsys, monkeypatch):
    """`needlework …`, in this process: what it printed, or, where it is expected to fail, what it said of that on stderr."""
    from needlework import cli

    def run(*arguments, ok=True):
        monkeypatch.setattr(sys, "argv", ["needlework", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert (not ended.value.code) == ok, printed.out + printed.err
        return printed.out if ok else printed.err

    return run


@pytest.fixture(scope="session")
def small_text(tmp_path_factory):
    """Twelve small files of real text: the standard library's own."""
    folder = tmp_path_factory.mktemp("text")
    with open(ast.__file__, encoding="utf-8") as file:
        text = file.read()
    for i in range(12):
        (folder / f"{i}.py").write_text(text[i * 3000 : (i + 1) * 3000], encoding="utf-8")
    return CorpusConfig(kind="files", paths=(str(folder),), held_out=0.2)
