"""Prints how long the tests took, by file and by fixture: `pytest -p tests.support.durations`.

A file's seconds include those of its fixtures. Processor time is that of the process of the tests and of those of its
descendants that have ended and were waited for. Programs of `fork_server.py` are descendants of a server that has not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Any, Final

import pytest

FILE_SECONDS: Final = 5.0  # shorter files are one row together
FIXTURE_SECONDS: Final = 1.0
Row = list[float]  # count, seconds, processor seconds

_files: dict[str, Row] = {}
_fixtures: dict[str, Row] = {}


def _add(rows: dict[str, Row], name: str, row: Row) -> None:
    rows[name] = [a + b for a, b in zip(rows.get(name, [0.0, 0.0, 0.0]), row, strict=True)]


def _timed(rows: dict[str, Row], name: str) -> Generator[None, object, object]:
    """Wrap a hook; add what it took to the row of that name."""
    began, used = time.perf_counter(), sum(os.times()[:4])
    try:
        return (yield)
    finally:
        _add(rows, name, [1.0, time.perf_counter() - began, sum(os.times()[:4]) - used])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _timed(_files, item.nodeid.partition("::")[0]))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    return (yield from _timed(_fixtures, f"{fixturedef.argname} of {fixturedef.baseid or 'pytest'}"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the rows of a worker to the controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["durations"] = (_files, _fixtures)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the rows of a worker."""
    for rows, found in zip((_files, _fixtures), getattr(node, "workeroutput", {}).get("durations", ()), strict=False):
        for name, row in found.items():
            _add(rows, name, row)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the tables in Markdown, the longest row first."""
    for title, rows, least in (("file", _files, FILE_SECONDS), ("fixture", _fixtures, FIXTURE_SECONDS)):
        shown = {name: row for name, row in rows.items() if row[1] >= least}
        rest = [row for name, row in rows.items() if name not in shown]
        terminalreporter.write_line(f"\n| {title} | count | seconds | of a processor |\n|---|---|---|---|")
        for name, row in sorted(shown.items(), key=lambda item: -item[1][1]):
            terminalreporter.write_line(_line(name, row))
        terminalreporter.write_line(_line(f"{len(rest)} others", [sum(column) for column in zip(*rest, strict=True)]))


def _line(name: str, row: Row) -> str:
    count, seconds, used = row or [0.0, 0.0, 0.0]
    return f"| {name} | {count:.0f} | {seconds:.1f} | {used:.1f} |"
