"""Formats the logs of a process as JSON lines or as short lines, hides secrets, and bounds log files.

    stderr is a terminal    short lines on stderr, and JSON lines in the run folder's `logs/MEMBER.log`
                            with `terse`, warnings alone on stderr: the process prints what happens by itself
    stderr is redirected    JSON lines on stderr; launchers redirect it to the same file

A JSON line has `time`, `level`, `member`, `logger`, `message`, perhaps `traceback`, and the fields of `extra={...}`.
Code never logs requests, tokens or offers. As a second protection, fields with such names and all bytes are hidden
here, and long texts are shortened.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

from fourfold.host.clock import utc_text
from fourfold.host.disk import make_private_folder
from fourfold.text import printable

MAX_BYTES: Final = 32 << 20
"""Largest log file. The file NAME.log.1 with the lines before it is as large again."""
KEPT_BYTES: Final = 64 << 10
"""Bytes at the end of a log that stay in it when `rotate` cuts it down: they tell why a process died soon after."""
_MAX_TEXT: Final = 8192  # characters of a message, a traceback or a field
_SECRET_FIELD: Final = re.compile(r"token$|tokens$|offer|authorization|secret|password|private|_key$", re.IGNORECASE)
_BEARER: Final = re.compile(r"(?i)\b(bearer)\s+(?!token\b)\S+")
_OWN_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def setup(member_id: str, *, run_dir: Path | None = None, terse: bool = False) -> None:
    """Send this process's logs to stderr, and to the run folder's log file if stderr is a terminal.

    A second call replaces the first one's settings.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _StderrHandler | _FileHandler)]:
        root.removeHandler(handler)
        handler.close()
    stream = _StderrHandler()
    root.addHandler(stream)
    if sys.stderr.isatty():
        stream.setFormatter(TerminalFormatter())
        if run_dir is not None:
            stream.setLevel(logging.WARNING if terse else logging.NOTSET)
            path = run_dir / "logs" / f"{member_id}.log"
            make_private_folder(run_dir)
            path.parent.mkdir(exist_ok=True)
            file = _FileHandler(path, encoding="utf-8", maxBytes=MAX_BYTES, backupCount=1)
            file.setFormatter(JsonFormatter(member_id))
            root.addHandler(file)
    else:
        stream.setFormatter(JsonFormatter(member_id))
    root.setLevel(logging.INFO)


# Types of our own, so that `setup` does not remove the handlers of libraries.
class _StderrHandler(logging.StreamHandler[Any]):
    @property
    def stream(self) -> Any:
        return sys.stderr  # looked up for each record: it may be redirected after `setup`

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


class _FileHandler(logging.handlers.RotatingFileHandler):
    pass


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def __init__(self, member_id: str) -> None:
        super().__init__()
        self._member_id = member_id

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": utc_text(record.created),
            "level": record.levelname.lower(),
            "member": self._member_id,
            "logger": record.name,
            "message": _clean(record.getMessage()),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = _clean(self.formatException(record.exc_info))
        return json.dumps(line, default=str, ensure_ascii=False)


class TerminalFormatter(logging.Formatter):
    """Formats a record as one line (local time, level if it is not INFO, message, fields) and its traceback below."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        fields = "".join(f"  {name}={value}" for name, value in _fields(record).items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock} {level}{_clean(record.getMessage())}{fields}"
        if record.exc_info:
            text += "\n" + _clean(self.formatException(record.exc_info))
        return printable(text)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    # Libraries (Ray, for one) add fields to every record of the process; their names begin with an underscore.
    extra = {k: value for k, value in vars(record).items() if k not in _OWN_FIELDS and not k.startswith("_")}
    return {name: _hide_secret(name, value) for name, value in extra.items()}


def _hide_secret(name: str, value: object) -> object:
    if isinstance(value, int | float):  # a number of tokens is not a secret
        return value
    if _SECRET_FIELD.search(name):
        return "[hidden]"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"[{len(value)} bytes]"
    if value is None:
        return value
    if isinstance(value, str) or len(str(value)) > _MAX_TEXT:
        return _clean(str(value))
    return value


def _clean(text: str) -> str:
    """Return the text without bearer tokens; of a long one the beginning, its number of characters, and the end."""
    text = _BEARER.sub(r"\1 [hidden]", text)
    if len(text) <= _MAX_TEXT:
        return text
    note = f" [{len(text)} characters] "
    head = (_MAX_TEXT - len(note)) * 2 // 3
    return text[:head] + note + text[head + len(note) - _MAX_TEXT :]


def rotate(log: Path) -> bool:
    """Cut down a log that other processes have open for appending, if it is longer than `MAX_BYTES`.

    The content is copied to NAME.log.1, because a file that is renamed would still be written to under its new name.
    Lines that are written in the microseconds between the copy and the cut are lost.

    Returns:
        Whether the log was cut, also if its last `KEPT_BYTES` could not be written back.
    """
    was_cut = False
    try:
        if log.stat().st_size <= MAX_BYTES:
            return False
        older_path = log.with_name(f"{log.name}.1")
        with log.open("rb") as source, older_path.open("w+b") as older, log.open("ab") as file:
            shutil.copyfileobj(source, older, 1 << 20)
            while os.fstat(file.fileno()).st_size > older.tell():  # the log has grown meanwhile
                shutil.copyfileobj(source, older)
            os.truncate(log, 0)
            was_cut = True
            older.seek(max(0, older.tell() - KEPT_BYTES))
            end = older.read()
            # Begin with a whole line, unless the last line alone is longer than what is kept.
            file.write(end.partition(b"\n")[2] or end)
    except OSError:  # the disk is full, or the file is gone: the next call tries again
        pass
    return was_cut
