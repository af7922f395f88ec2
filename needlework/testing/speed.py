"""A pytest plugin (`-p needlework.testing.speed`): the tests that cost most, in seconds of CPU.

It reports and judges nothing: a test's verdict does not depend on how long it took.
"""

import resource
from collections.abc import Generator
from typing import Any

import pytest

from needlework.testing import processes

LIMIT = 5  # seconds of its own above which a test carries the mark `slow`
costs: list[tuple[float, str]] = []
over: list[str] = []


def cpu() -> float:
    """Seconds of CPU that this process, its children that have ended, and forked ones took."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used) + processes.seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """With what it shares, if it is the first that asks for it."""
    began = cpu()
    result = yield
    item.user_properties.append(("cpu", cpu() - began))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    began = cpu()
    try:
        return (yield)
    finally:
        item.user_properties.append(("own cpu", cpu() - began))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    processes.end()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Also of the workers' tests: their reports come here."""
    if report.when == "teardown":
        found: dict[str, Any] = dict(report.user_properties)
        own = found.get("own cpu", 0.0)
        costs.append((own + found.get("cpu", 0.0), report.nodeid))
        if own > LIMIT and "slow" not in report.keywords:
            over.append(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("ten slowest, seconds of CPU")
    for seconds, test in sorted(costs, reverse=True)[:10]:
        terminalreporter.line(f"{seconds:6.1f}  {test}")
    for test in sorted(over):
        terminalreporter.line(f"over {LIMIT} s and not marked slow: {test}", red=True)
