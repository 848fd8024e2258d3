"""Renders the templates. Every value is escaped: texts of samples are hostile."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeGuard

import jinja2
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from fourfold.text import format_duration, of_measure

from ..data.question import last_message
from ..state.eval_results import EvalRow, SetResult
from .charts import short_number

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
    return short_number(value) if is_number(value) else "\N{EN DASH}"


def cut(text: str, length: int) -> str:
    """Return the beginning of a text, on one line."""
    text = " ".join(text[: 4 * length].split())
    return text if len(text) <= length else f"{text[: length - 1]}\N{HORIZONTAL ELLIPSIS}"


def moment(text: str, *, short: bool = False) -> Markup:
    """Return a time for view.js, which formats it in the browser's time zone with its age; other texts stay unchanged.

    With `short`, view.js writes the age alone.
    """
    try:
        found = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return escape(text)
    form = Markup('<time datetime="{:%Y-%m-%dT%H:%M:%SZ}"{}>{:%Y-%m-%d %H:%M} UTC</time>')
    return form.format(found, " data-short" * short, found)


def answer_count(evaluation: EvalRow | SetResult) -> Markup:
    """Return the number of answers of a held-out score, with a mark if some have no score."""
    count, missing = evaluation.answer_count, evaluation.missing_count
    if not missing:
        return Markup("<small>({:,} answer{})</small>").format(count, "s" * (count != 1))
    text = f"{count:,} of {count + missing:,} answers; {missing:,} without a score"
    return Markup('<span class="mark">{}</span>').format(text)


def measured(evaluation: EvalRow | SetResult) -> tuple[float, float | Sequence[float] | None]:
    """Return score and interval of a held-out score to show; of rows, its loss and the interval of that."""
    return of_measure(evaluation.score, evaluation.bounds, evaluation.measure)


_ENVIRONMENT.filters |= {"number": number, "cut": cut, "moment": moment, "answer_count": answer_count}
_ENVIRONMENT.filters |= {"duration": format_duration, "last_message": last_message, "measured": measured}


def render(template: str, request: Request, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page."""
    page = _ENVIRONMENT.get_template(template).render(path=request.url.path, status=status, **values)
    return HTMLResponse(page.encode(errors="replace"), status)  # unpaired surrogates of a model's text
