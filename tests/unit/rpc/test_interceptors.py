"""The log of refused calls is bounded in rate, number of entries and length."""

from __future__ import annotations

import pytest

from fourfold.errors import Overloaded, PermissionDenied, Unauthenticated
from fourfold.rpc import interceptors
from fourfold.rpc.interceptors import REFUSAL_INTERVAL_SECONDS, RefusalLog
from tests.fakes.clock import FakeClock

NO_TOKEN = Unauthenticated("no bearer token")


def add(log: RefusalLog, method: str = "/a.B/C", caller: str = "ipv4:10.0.0.1", error: Exception = NO_TOKEN) -> None:
    assert isinstance(error, Unauthenticated | PermissionDenied | Overloaded)
    log.add(method, error, caller=caller, peer=f"{caller}:4711")


async def test_the_first_is_logged_at_once_and_the_others_are_counted(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = RefusalLog(clock=clock)
    for _ in range(1000):
        add(log)
    assert caplog.messages == ["/a.B/C refused to ipv4:10.0.0.1 at 'ipv4:10.0.0.1:4711': no bearer token"]
    caplog.clear()
    await clock.advance(REFUSAL_INTERVAL_SECONDS)
    add(log)
    first, second = caplog.messages
    assert first == "/a.B/C refused 999 more times to ipv4:10.0.0.1 in 60 s: UNAUTHENTICATED"
    assert second.startswith("/a.B/C refused to ipv4:10.0.0.1 at ")


async def test_method_reason_and_caller_are_counted_apart_and_told_at_the_end(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = RefusalLog(clock=clock)
    for _ in range(2):
        add(log)
        add(log, method="/a.B/D")
        add(log, caller="ipv4:10.0.0.2")
        add(log, error=PermissionDenied("not you"))
    assert len(caplog.messages) == 4
    caplog.clear()
    log.flush()
    assert len(caplog.messages) == 4 and all(" 1 more times " in message for message in caplog.messages)
    caplog.clear()
    log.flush()
    assert caplog.messages == []


def test_many_callers_share_one_line(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptors, "_MAX_REFUSAL_KINDS", 3)
    log = RefusalLog(clock=clock)
    for number in range(100):
        add(log, caller=f"ipv4:10.0.0.{number}")
    assert len(caplog.messages) == 4
    log.flush()
    assert caplog.messages[-1] == "other methods refused 96 more times to other callers in 0 s: other reasons"


def test_long_texts_and_control_characters_do_not_reach_the_log(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    text = "\x1b[2J" * (2 << 20)
    RefusalLog(clock=clock).add("/a.B/C", PermissionDenied(text), caller="x" * (8 << 20), peer="\x1b" * (8 << 20))
    (message,) = caplog.messages
    assert len(message) < 1500 and message.isprintable()
