"""What tests of several rooms share: the command line in this process, processes that start at once, and a little real text."""

import ast
import gc
import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

from needlework.data import CorpusConfig
from needlework.testing import processes, ranks


def pytest_collection_finish():
    """Collections leave alone what was imported, which stays to the end: looking at it was a tenth of all CPU."""
    gc.freeze()
    gc.set_threshold(700, 10, 100)


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


def begin(environment, function, *arguments):
    os.environ.clear()
    os.environ |= environment
    function(*arguments)


@pytest.fixture
def forked():
    """A function: forked(f, ...) -> a process that calls f(pipe, ...), f a function of a test's module, and our end of the pipe."""
    made, started = processes.context(ranks.IMPORTED), []

    def start(function, *arguments):
        ours, theirs = made.Pipe()
        process = made.Process(target=begin, args=(dict(os.environ), function, theirs, *arguments))
        process.start()
        theirs.close()
        started.append((process, ours))
        return process, ours

    yield start
    for process, _ in started:
        process.kill()
        process.join()


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers of a sweep or a comparison that start at once; elsewhere they are spawned."""
    made = processes.context(ranks.IMPORTED)
    monkeypatch.setattr("needlework.experiment.workers.multiprocessing.get_context", lambda method: made)


@pytest.fixture(scope="session")
def small_text(tmp_path_factory):
    """Twelve small files of real text: the standard library's own."""
    folder = tmp_path_factory.mktemp("text")
    with open(ast.__file__, encoding="utf-8") as file:
        text = file.read()
    for i in range(12):
        (folder / f"{i}.py").write_text(text[i * 3000 : (i + 1) * 3000], encoding="utf-8")
    return CorpusConfig(kind="files", paths=(str(folder),), held_out=0.2)
