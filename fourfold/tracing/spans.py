"""Makes the spans of this process. While tracing is off, which is the default, a piece of work takes 0.5 us more.

Work is often done for many samples at once: one Generate call samples a group, and one TrainStep call trains a batch.
Each sample has a trace of its own, so that a piece of work has a span in each of these traces (`Spans`).

    with spans.current().child("generate") as work:  # one span in the trace of each sample of the running call
        ...
        work.end(2, {"gen_ai.usage.output_tokens": 17})  # that of sample 2 ends before the others

OpenTelemetry is imported by the exporter alone (`export.py`), which `install` makes the receiver of ended spans.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self

from fourfold.errors import FourfoldError

Value = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]
Kind = Literal["internal", "server", "client"]
_NO_ATTRIBUTES: Final[Attributes] = {}
_NO_ID: Final = "0" * 16
_NEW_IDS: Final = 512
_ids: Final = list[str]()  # of spans to come: a system call for each would be a third of the time that a span takes
os.register_at_fork(after_in_child=_ids.clear)


class SpanContext(NamedTuple):
    """The identity of a span in all processes."""

    trace_id: str  # 32 lowercase hexadecimal digits, not all 0
    span_id: str  # 16 of them


class Span:
    """A span in one trace. It is exported when it ends."""

    __slots__ = ("attributes", "context", "end_time", "error", "kind", "links", "name", "parent", "start_time")

    def __init__(
        self,
        name: str,
        parent: SpanContext | None,
        *,
        kind: Kind = "internal",
        attributes: Attributes = _NO_ATTRIBUTES,
        links: tuple[SpanContext, ...] = (),
        trace_id: str = "",
        span_id: str = "",
    ) -> None:
        """Begin a span; one without a parent is the root of the trace `trace_id`, by default of a new one.

        `span_id` is for a span that another process may have to end in the place of this one.
        """
        self.name, self.parent, self.kind, self.links = name, parent, kind, links
        trace_id = parent.trace_id if parent else trace_id or _new_id() + _new_id()
        self.context = SpanContext(trace_id, span_id or _new_id())
        self.attributes = attributes  # of several spans: they are replaced, not changed
        self.start_time, self.end_time = time.time_ns(), 0  # ns since 1970; `end_time` is 0 until the end
        self.error: str | None = None  # reason of a failure; None: there was none

    def end(self, attributes: Attributes = _NO_ATTRIBUTES, *, error: str | None = None) -> None:
        """End the span, once, and hand it to the exporter."""
        if not self.end_time:
            if attributes:
                self.attributes = {**self.attributes, **attributes}
            now = time.time_ns()
            self.end_time, self.error = now if now > self.start_time else self.start_time, error
            if _export is not None:
                _export(self)


class Spans:
    """Spans of one piece of work, at most one in the trace of each sample, by the index of the sample in the work.

    As a context manager, `current` returns it inside the block, and the end of the block ends its spans.
    """

    __slots__ = ("_before", "_spans")

    def __init__(self, spans: Mapping[int, Span]) -> None:
        self._spans: Final = spans
        self._before: Token[Spans] | None = None

    def __bool__(self) -> bool:
        return bool(self._spans)

    def running(self) -> dict[int, Span]:
        """Return the spans that have not ended, by the index of their sample."""
        return {index: span for index, span in self._spans.items() if not span.end_time}

    def child(
        self,
        name: str,
        *,
        kind: Kind = "internal",
        attributes: Attributes = _NO_ATTRIBUTES,
    ) -> Spans:
        """Begin a piece of this work: a child of each span that has not ended."""
        if not self._spans:
            return NONE
        return Spans(
            {
                index: Span(name, span.context, kind=kind, attributes=attributes)
                for index, span in self.running().items()
            }
        )

    def set(self, attributes: Attributes) -> None:
        """Set attributes of the spans that have not ended; a thread reads the others."""
        for span in self._spans.values():
            if not span.end_time:
                span.attributes = {**span.attributes, **attributes}

    def end(self, index: int, attributes: Attributes = _NO_ATTRIBUTES) -> None:
        """End the span of one sample, if it is traced."""
        if (span := self._spans.get(index)) is not None:
            span.end(attributes)

    def end_all(self, *, error: str | None = None) -> None:
        """End the spans that have not ended."""
        for span in self._spans.values():
            span.end(error=error)

    def __enter__(self) -> Self:
        if self._spans:
            self._before = _current.set(self)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            _current.reset(self._before)
            self._before = None
            self.end_all(error=None if error is None else failure_reason(error))


NONE: Final = Spans({})
_current: Final = ContextVar("spans", default=NONE)
_export: Callable[[Span], None] | None = None


def current() -> Spans:
    """Return the spans of the work that the caller is a part of; without any while tracing is off."""
    return _current.get()


@contextmanager
def part_of_work(samples: range) -> Iterator[None]:
    """Let `current` return the spans of these samples alone, by their index among them, inside the block."""
    part = {index - samples.start: span for index, span in current().running().items() if index in samples}
    before = _current.set(Spans(part))
    try:
        yield
    finally:
        _current.reset(before)


def enabled() -> bool:
    """Return whether this process makes spans."""
    return _export is not None


def install(export: Callable[[Span], None] | None) -> None:
    """Make spans from now on, and pass each to `export` when it ends, in the thread that ends it; None: make none."""
    global _export
    _export = export


def failure_reason(error: BaseException) -> str:
    """Return the reason of an error. Its message is not in a span: it may have texts of users."""
    return error.reason if isinstance(error, FourfoldError) else type(error).__name__


def _new_id() -> str:
    """Return random hexadecimal digits, as many as the id of a span has. Thread-safe."""
    try:
        return _ids.pop()
    except IndexError:
        digits, size = os.urandom(len(_NO_ID) // 2 * _NEW_IDS).hex(), len(_NO_ID)
        new = [digits[begin : begin + size] for begin in range(0, len(digits), size)]
        _ids.extend(each for each in new if each != _NO_ID)
        return _new_id()
