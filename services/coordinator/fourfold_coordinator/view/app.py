"""The web application: routes, access, and the headers of every response.

Access: on loopback without a token, requests of web pages of other sites are refused (`fourfold.security.web_pages`).
With a token, every request needs it: as `Authorization: Bearer TOKEN`, or in a cookie that the address `/?token=TOKEN`
sets. Only GET and HEAD exist, and no response allows another origin.
"""

from __future__ import annotations

import hmac
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fourfold.security.web_pages import joined, refusal

from . import pages, sample_pages
from .reader import RunFolders
from .templates import render

COOKIE: Final = "fourfold_view"
_STATIC: Final = Path(__file__).parent / "static"
_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


def make_app(runs: RunFolders, *, token: str = "") -> Starlette:
    """Return the application for some runs. With `token`, only its holders have access, by any name of this machine."""
    routes: Sequence[Route | Mount] = (
        Route("/", pages.runs),
        Route("/compare", pages.compare),
        Route("/run/{run}", pages.overview),
        Route("/run/{run}/timeline", pages.timeline),
        Route("/run/{run}/weights", pages.weights),
        Route("/run/{run}/recipe", pages.recipe),
        Route("/run/{run}/answers", pages.answers),
        Route("/run/{run}/samples", sample_pages.samples),
        Route("/run/{run}/sample/{sample:path}", sample_pages.sample),
        Mount("/static", StaticFiles(directory=_STATIC)),
    )
    app = Starlette(
        routes=list(routes),
        exception_handlers={HTTPException: _show_error, sqlite3.Error: _show_index_error},
    )
    app.state.runs = runs
    app.add_middleware(_Access, token=token)
    return app


async def _show_error(request: Request, error: Exception) -> Response:
    status, detail = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "")
    if detail == "Not Found":  # of the router
        detail = f"there is no page {request.url.path!r}; the list of runs leads to all pages"
    return render("error.html", request, status=status, detail=detail)


async def _show_index_error(request: Request, error: Exception) -> Response:
    detail = f"the index cannot be read now ({error}); load the page again, or delete index.db if that does not help"
    return render("error.html", request, status=503, detail=detail)


class _Access:
    """Checks each request, and adds the headers to each response."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in _HEADERS}
                message["headers"] = [h for h in message["headers"] if h[0].lower() not in names] + [*_HEADERS]
            await send(message)

        answer = self._refuse(Request(scope)) or self._app
        await answer(scope, receive, send_with_headers)

    def _refuse(self, request: Request) -> Response | None:
        """Return the answer to a request that may not see the pages; None if it may."""
        if not self._token:
            refused = refusal(request.method, joined(request.headers.raw))
            return PlainTextResponse(refused[1], refused[0]) if refused else None
        given = request.query_params.get("token", "")
        if given and self._fits(given):
            answer = RedirectResponse(request.url.remove_query_params("token").replace(scheme="", netloc=""), 303)
            secure = request.url.scheme == "https"
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict", secure=secure)
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._fits(bearer) or self._fits(request.cookies.get(COOKIE, "")):
            return None
        return PlainTextResponse(
            "a token is needed; open the address with ?token=... that `fourfold view` printed", 401
        )

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())
