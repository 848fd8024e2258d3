"""Renders the templates. Every value is escaped: texts of samples are hostile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeGuard

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse

from fourfold.text import format_duration

from ..data.question import last_message

_LARGEST: Final = 1e300
_ENVIRONMENT: Final = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number; sums and differences of two of them are finite, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def number(value: object) -> str:
    """Return a number in 4 digits; a dash for none."""
    return f"{value:.4g}" if is_number(value) else "\N{EN DASH}"


def cut(text: str, length: int) -> str:
    """Return the beginning of a text, on one line."""
    text = " ".join(text[: 4 * length].split())
    return text if len(text) <= length else f"{text[: length - 1]}\N{HORIZONTAL ELLIPSIS}"


_ENVIRONMENT.filters |= {"number": number, "cut": cut, "duration": format_duration, "last_message": last_message}


def render(template: str, request: Request, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page."""
    page = _ENVIRONMENT.get_template(template).render(path=request.url.path, status=status, **values)
    return HTMLResponse(page.encode(errors="replace"), status)  # unpaired surrogates of a model's text
