"""The pages of `fourfold view` over https, in a process of its own: certificate, token and cookie."""

from __future__ import annotations

import http.client
import os
import ssl
from contextlib import closing
from email.message import Message
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fourfold_tools import certs
from tests.support import browser
from tests.support.view_run import write_run

TOKEN = "token-of-the-browsers"


def _get(connection: http.client.HTTPConnection, path: str, **headers: str) -> tuple[int, Message, str]:
    with closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def test_pages_are_served_with_tls_and_the_cookie_of_the_token_is_secure(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    certs.make(directory)
    pair = str(directory / "rollout-0.pem")  # with the names of this machine
    (tmp_path / "token").write_text(TOKEN)
    options = ("--tls-cert", pair, "--tls-key", pair, "--token-file", str(tmp_path / "token"))
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with browser.serve([write_run(tmp_path / "one")], *options, env=env) as address:
        url = urlsplit(address)
        assert (url.scheme, url.hostname, url.query) == ("https", "127.0.0.1", f"token={TOKEN}")

        def connect(authority: Path | None = directory / "ca.pem") -> http.client.HTTPSConnection:
            context = ssl.create_default_context(cafile=authority)
            return http.client.HTTPSConnection("127.0.0.1", url.port, timeout=20, context=context)

        assert _get(connect(), "/")[0] == 401
        status, headers, _ = _get(connect(), f"/?token={TOKEN}")
        assert status == 303 and "; secure" in headers["set-cookie"].lower()
        cookie = headers["set-cookie"].partition(";")[0]
        status, _, page = _get(connect(), "/run/one", cookie=cookie)
        assert status == 200 and "raise sampling.temperature" in page
        with pytest.raises(ssl.SSLCertVerificationError):
            _get(connect(None), "/")
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            _get(http.client.HTTPConnection("127.0.0.1", url.port, timeout=20), "/")
