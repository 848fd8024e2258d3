"""Logs of a process: JSON lines for machines, short lines for people.

On a terminal a person reads short lines; everywhere else (a launcher redirects stderr to
`runs/NAME/logs/MEMBER.log`) each record is one JSON object with `time`, `level`, `member`,
`logger`, `message` and the fields given as `extra={...}`. When a service runs on a terminal
and has a run folder, the JSON lines go to its log file as well. Requests, tokens and offers
are never logged; as a second fence, fields with such names and all bytes are blanked here, and
long texts are shortened. A log file is bounded: this one here, what a launcher redirects by
`fourfold.host.log_rotation`.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import re
import sys
import time
from pathlib import Path
from typing import Any, Final

from fourfold.host import log_rotation

_SECRET_FIELD: Final = re.compile(r"token$|tokens$|offer|authorization|secret|password|private|_key$", re.IGNORECASE)
_BEARER: Final = re.compile(r"(?i)\b(bearer)\s+(?!token\b)\S+")
_MAX_TEXT: Final = 8192
"""Characters of a message, a traceback or a field."""
_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_OWN_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def setup(member_id: str, *, run_dir: Path | None = None, level: int = logging.INFO) -> None:
    """Send this process's logs to stderr, and to the run folder's log file when stderr is a terminal.

    May be called again; the last call counts.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _OURS)]:
        root.removeHandler(handler)
        handler.close()
    stream = _Stream()
    root.addHandler(stream)
    if sys.stderr.isatty():
        stream.setFormatter(HumanFormatter())
        if run_dir is not None:
            path = run_dir / "logs" / f"{member_id}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            file = _File(path, encoding="utf-8", maxBytes=log_rotation.MAX_BYTES, backupCount=1)
            file.setFormatter(JsonFormatter(member_id))
            root.addHandler(file)
    else:
        stream.setFormatter(JsonFormatter(member_id))
    root.setLevel(level)


class _Stream(logging.StreamHandler[Any]):
    """Ours, to be told from the handlers of libraries."""

    @property
    def stream(self) -> Any:
        """Whatever stderr is now; it may be redirected after the set-up."""
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


class _File(logging.handlers.RotatingFileHandler):
    """Ours, to be told from the handlers of libraries."""


_OURS: Final = (_Stream, _File)


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, member_id: str) -> None:
        super().__init__()
        self._member_id = member_id

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "member": self._member_id,
            "logger": record.name,
            "message": _clean(record.getMessage()),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = _clean(self.formatException(record.exc_info))
        return json.dumps(line, default=str, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """Time, level where it matters, message, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one short line, and the traceback below it if it has one."""
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        fields = "".join(f"  {name}={value}" for name, value in _fields(record).items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock} {level}{_clean(record.getMessage())}{fields}"
        if record.exc_info:
            text += "\n" + _clean(self.formatException(record.exc_info))
        return text.translate(_CONTROL)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    # Libraries put fields of their own into every record of the process; their names begin with an underscore.
    extra = {k: value for k, value in vars(record).items() if k not in _OWN_FIELDS and not k.startswith("_")}
    return {name: _blank(name, value) for name, value in extra.items()}


def _blank(name: str, value: object) -> object:
    if _SECRET_FIELD.search(name) and not isinstance(value, int | float):  # a count of tokens is no secret
        return "[hidden]"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"[{len(value)} bytes]"
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str) or len(str(value)) > _MAX_TEXT:
        return _clean(str(value))
    return value


def shorten(text: str, limit: int = _MAX_TEXT) -> str:
    """Return a text of at most `limit` characters: the beginning and the end, and how long it was."""
    if len(text) <= limit:
        return text
    note = f" [{len(text)} characters] "
    head = (limit - len(note)) * 2 // 3
    return text[:head] + note + text[head + len(note) - limit :]


def _clean(text: str) -> str:
    return shorten(_BEARER.sub(r"\1 [hidden]", text))


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
