"""Spans of one piece of work in the traces of several samples."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from fourfold.errors import InvalidInput
from fourfold.tracing.spans import NONE, Span, Spans, current


def work(count: int = 2) -> Spans:
    return Spans({index: Span("work", None) for index in range(count)})


def test_each_sample_has_a_child_in_its_own_trace(ended: list[Span]) -> None:
    with work() as outer, current().child("inner", attributes={"a": 1}) as inner:
        pairs = list(zip(outer.running().values(), inner.running().values(), strict=True))
        assert all(child.parent == parent.context and child.attributes == {"a": 1} for parent, child in pairs)
        assert len({child.context.trace_id for _, child in pairs}) == 2
        assert current() is inner
    assert [span.name for span in ended] == ["inner", "inner", "work", "work"] and not current()
    assert all(span.start_time <= span.end_time and span.error is None for span in ended)


def test_spans_with_the_same_attributes_get_further_ones_apart(ended: list[Span]) -> None:
    given = {"a": 1}
    with work(2).child("inner", attributes=given) as inner:
        inner.end(0, {"b": 2})
        inner.set({"c": 3})
    assert [span.attributes for span in ended] == [{"a": 1, "b": 2}, {"a": 1, "c": 3}] and given == {"a": 1}


def test_a_sample_may_end_before_the_others(ended: list[Span]) -> None:
    with work(3) as outer:
        outer.end(1, {"tokens": 3})
        assert [span.attributes for span in ended] == [{"tokens": 3}]
        assert list(outer.child("later").running()) == [0, 2]
        outer.end(1, {"tokens": 4})  # once
        outer.end(9)  # not traced
        outer.set({"late": True})
    assert len(ended) == 3 and ended[0].attributes == {"tokens": 3}


def test_an_error_ends_the_spans_with_its_reason_and_without_its_message(ended: list[Span]) -> None:
    with pytest.raises(InvalidInput), work(1):
        raise InvalidInput("a secret prompt", reason="BAD_PROMPT")
    with pytest.raises(KeyError), work(1):
        raise KeyError("a secret prompt")
    assert [span.error for span in ended] == ["BAD_PROMPT", "KeyError"]


async def test_tasks_have_the_spans_of_the_work_that_began_them(ended: list[Span]) -> None:
    async def inner() -> Spans:
        await asyncio.sleep(0)
        return current()

    with work() as outer:
        task = asyncio.create_task(inner())
    assert await task is outer and await asyncio.create_task(inner()) is NONE


def test_ids_are_new_and_not_0() -> None:
    contexts = [Span("x", None).context for _ in range(500)]
    assert len({c.trace_id for c in contexts}) == len({c.span_id for c in contexts}) == 500
    assert all(len(c.trace_id) == 32 and len(c.span_id) == 16 for c in contexts)
    assert all(int(digits, 16) > 0 for c in contexts for digits in c)


def test_a_forked_process_has_other_ids() -> None:
    code = (
        "import os; from fourfold.tracing.spans import Span; Span('x', None); child = os.fork(); "
        "os.write(1, (Span('x', None).context.span_id + ' ').encode()); child and os.waitpid(child, 0)"
    )
    # In a process without other threads: Python 3.12 warns of a fork beside them.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert len(set(done.stdout.split())) == 2
